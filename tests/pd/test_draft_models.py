"""Draft layers between a prefill and a decode worker: handed over with every page, and nothing beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_models import AskAlways, runner_with_draft, with_draft
from every_kind import KINDS, Answer, params_of, prompt_of, replayed

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.grammar_thread import GrammarThread
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.sampling_params import SamplingParams
from diptych.grammars.compiler import Compiler
from diptych.tokens.tokenizer import Tokenizer

Pair = Any  # the fixture's class: test helpers can't be imported
ROOMS = range(1, 2 * len(KINDS) + 1)
VOCAB, PAGE, NUM_PAGES = 321, 4, 256
NEVER = 1 << 30  # moves between two looks at the books
NOTHING: Mapping[int, tuple[int, ...]] = {}
UNCHECKED = TransferRules(integrity="off")


def greedy(room: int) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


class Served:
    """A pair that has served requests, with a model that guesses, or without."""

    def __init__(
        self,
        make_pair: type[Pair],
        source: ModelSource,
        draft: ModelSource | None,
        said: Mapping[int, tuple[int, ...]] = NOTHING,
        params_of: Callable[[int], SamplingParams] = params_of,
        **options: Any,
    ) -> None:
        self.source = source if draft is None else with_draft(source, draft)

        def model(num_pages: int) -> tuple[Any, ModelRunner]:
            layout = ModelRunner.pool_layout(self.source.config, num_pages=num_pages, page_size=PAGE, dtype="float32")
            kv = torch.full(layout.shape, torch.nan)
            return kv.numpy(), runner_with_draft(self.source, draft, kv)

        self.drafter = AskAlways() if draft is not None else None
        self.pair = pair = make_pair(
            prefill_pages=NUM_PAGES,
            decode_pages=NUM_PAGES,
            model=model,
            vocab_size=VOCAB,
            check_every=NEVER,
            drafter=self.drafter,
            **options,
        )
        if self.drafter is not None:
            self.drafter.begin(pair.decode.runner.draft_model, pair.decode.cache)
        for room in said or ROOMS:
            tokens = said.get(room, ())
            params = replayed(params_of(room), len(tokens))
            pair.start_with(params, room, [*prompt_of(room), *tokens], num_prior_output_tokens=len(tokens))
            if room % 2:  # the others come beside it
                pair.run()
        pair.run()
        pair.close()
        pair.assert_clean()
        self.answers = {room: self._answer(room) for room in said or ROOMS}

    def _answer(self, room: int) -> Answer:
        return Answer.of([*self.pair.prefill.outputs[room][:1], *self.pair.decode.outputs[room]])

    @property
    def page_nbytes(self) -> int:
        return int(self.pair.prefill.kv[0].nbytes)


@pytest.fixture
def served(tiny_folder: Path, byte_tokenizer: Tokenizer, make_pair: type[Pair]) -> Any:
    source = open_model(str(tiny_folder))
    grammars = GrammarThread(lambda: Compiler(byte_tokenizer, VOCAB, [0]))

    def serve(*, guesses: bool, **options: Any) -> Served:
        return Served(make_pair, source, source if guesses else None, grammars=grammars, **options)

    yield serve
    grammars.close()


def test_a_pair_answers_the_same_and_hands_over_the_same_pages_with_one_part_more(served: Any) -> None:
    plain, guessed = (served(guesses=guesses) for guesses in (False, True))
    assert guessed.answers == plain.answers
    assert guessed.drafter.compared > 60
    for side in ("prefill", "decode"):  # whose prefixes are found as before
        computed, before = (getattr(each.pair, side).runner.num_tokens for each in (guessed, plain))
        assert computed == before if side == "prefill" else computed > before
    assert guessed.pair.num_written == plain.pair.num_written
    config = plain.source.config
    of_draft = config.num_layers * 2 * PAGE * config.num_kv_heads * config.head_dim * 4
    assert guessed.page_nbytes == plain.page_nbytes + of_draft


def test_requests_that_are_replayed_in_mid_stream_go_on_as_before(served: Any) -> None:
    whole = served(guesses=False).answers
    said = {room: answer.token_ids[: 1 + room % 8] for room, answer in whole.items()}
    said = {room: tokens for room, tokens in said.items() if len(tokens) < len(whole[room].token_ids)}
    rest = served(guesses=True, said=said).answers
    assert all((*tokens, *rest[room].token_ids) == whole[room].token_ids for room, tokens in said.items())


def test_what_prefill_computed_of_the_draft_layers_guesses_right(served: Any) -> None:
    guessed = served(guesses=True, params_of=greedy)
    assert guessed.drafter.came == guessed.drafter.compared > 100


def test_draft_layers_that_did_not_come_guess_wrong_and_change_no_answer(
    served: Any, make_pair: type[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where only a model's own layers were sent."""
    expected = served(guesses=False, params_of=greedy).answers
    write = make_pair._write

    def losing(pair: Pair, side: Any, other: Any, effect: Any) -> Any:
        written = write(pair, side, other, effect)
        half = other.kv.shape[1] // 2
        other.kv[np.asarray(effect.write.dst), half:] = 0
        return written

    monkeypatch.setattr(make_pair, "_write", losing)
    guessed = served(guesses=True, params_of=greedy, rules=UNCHECKED)
    assert guessed.answers == expected
    assert guessed.drafter.came < 0.95 * guessed.drafter.compared
