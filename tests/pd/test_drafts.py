"""Drafts where decode is another worker than prefill: the same tokens, scores and ends, whatever is asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from every_kind import MAX_DRAFTS, Answer, Scripted, params_of, prompt_of, replayed

from diptych.checkpoints.source import open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.grammar_thread import GrammarThread
from diptych.engine.values.kv_regions import pages_per_state
from diptych.generation.output import Output
from diptych.grammars.compiler import Compiler
from diptych.tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.integration

Pair = Any  # the fixture's class: test helpers can't be imported
Answers = Callable[..., dict[int, Answer]]
ROOMS = range(1, 51)
VOCAB, PAGE = 321, 4
NUM_PAGES, FEW_PAGES = 512, 40
NEVER = 1 << 30  # moves between two looks at the books


@pytest.fixture(scope="module")
def grammars(byte_tokenizer: Tokenizer) -> Iterator[GrammarThread]:
    thread = GrammarThread(lambda: Compiler(byte_tokenizer, VOCAB, [0]))
    yield thread
    thread.close()


@pytest.fixture(params=["tiny_folder", "tiny_recurrent_folder"])
def answers(request: pytest.FixtureRequest, grammars: GrammarThread, make_pair: type[Pair], squeeze: Any) -> Answers:
    """Serves requests by a pair, with drafts of the answers that it is told."""
    source = open_model(str(request.getfixturevalue(request.param)))
    one = ModelRunner.pool_layout(source.config, num_pages=1, page_size=PAGE, dtype="float32")
    per_state = pages_per_state(source.config, 1, "float32", one)

    def model(num_pages: int) -> tuple[Any, ModelRunner]:
        layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE, dtype="float32")
        kv = np.full(layout.shape, np.nan, np.float32)
        sizes: dict[str, Any] = {"max_requests": 16, "row_tokens": 1 + MAX_DRAFTS}
        return kv, ModelRunner(source, torch.from_numpy(kv), dtype="float32", **sizes)

    def serve(
        told: Mapping[int, Sequence[int]],
        *,
        said: Mapping[int, Sequence[int]] = {},
        is_squeezed: bool = False,
        overlap: bool = False,
    ) -> dict[int, Answer]:
        pair = make_pair(
            prefill_pages=NUM_PAGES,
            decode_pages=FEW_PAGES if is_squeezed else NUM_PAGES,
            model=model,
            grammars=grammars,
            vocab_size=VOCAB,
            overlap=overlap,
            check_every=NEVER,
            drafter=Scripted(told),
            pages_per_state=per_state,
        )
        for room in said or ROOMS:
            tokens = said.get(room, ())
            params = replayed(params_of(room), len(tokens))
            pair.start_with(params, room, [*prompt_of(room), *tokens], num_prior_output_tokens=len(tokens))
        run_squeezed(pair, squeeze(pair.decode.cache)) if is_squeezed else pair.run()
        pair.close()
        pair.assert_clean()
        lens = [len(output.token_ids) for outputs in pair.decode.outputs.values() for output in outputs]
        assert (max(lens) > 2) == bool(told), "tokens come several at a time where there are drafts"
        assert (pair.decode.core.report().counts.retractions > 0) == is_squeezed
        return {room: Answer.of(outputs_of(pair, room)) for room in said or ROOMS}

    return serve


def run_squeezed(pair: Pair, others: Any) -> None:
    """Let others take what memory is left, and give it back, at random."""
    while pair.compile(pair.prefill) or pair.compile(pair.decode):
        pass
    rng = random.Random(0)
    while move(pair) or others.release():
        if rng.random() < 0.4:
            others.toggle()


def move(pair: Pair) -> bool:
    pair.expire()
    return any([pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill), pair.step(pair.decode)])


def outputs_of(pair: Pair, room: int) -> list[Output]:
    """Return what a client hears: the first token from prefill, all else from decode."""
    return [*pair.prefill.outputs[room][:1], *pair.decode.outputs[room]]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pair_answers_as_it_does_without_drafts(answers: Answers, overlap: bool) -> None:
    plain = answers({}, overlap=overlap)
    assert answers({room: answer.token_ids for room, answer in plain.items()}, overlap=overlap) == plain


def test_requests_that_are_replayed_in_mid_stream_go_on_as_before(answers: Answers) -> None:
    whole = answers({})
    cut = {room: answer.token_ids[: 1 + room % 8] for room, answer in whole.items()}
    said = {room: tokens for room, tokens in cut.items() if len(tokens) < len(whole[room].token_ids)}
    rest = answers({room: answer.token_ids[len(said.get(room, ())) :] for room, answer in whole.items()}, said=said)
    for room, tokens in said.items():
        assert (*tokens, *rest[room].token_ids) == whole[room].token_ids
        assert rest[room].logprobs == whole[room].logprobs[len(tokens) :]


def test_requests_that_are_retracted_at_decode_go_on_as_before(answers: Answers) -> None:
    plain = answers({}, is_squeezed=True)
    assert answers({room: answer.token_ids for room, answer in plain.items()}, is_squeezed=True) == plain
