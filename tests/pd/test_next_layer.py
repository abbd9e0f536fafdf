"""A layer that predicts one token more between a prefill and a decode worker, and where an output moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sure_next_layer
import torch
from every_kind import KINDS, Answer, params_of, prompt_of, replayed
from next_layers import AskNextLayer, random_folder, runner_with_next, with_next
from sure_next_layer import by_rows

from diptych.checkpoints.source import open_model
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
    """A pair that has served requests, with the layer that guesses or without."""

    def __init__(
        self,
        make_pair: type[Pair],
        folder: Path,
        guesses: bool,
        said: Mapping[int, tuple[int, ...]] = NOTHING,
        params_of: Callable[[int], SamplingParams] = params_of,
        **options: Any,
    ) -> None:
        source = open_model(str(folder))
        self.source = with_next(source) if guesses else source

        def model(num_pages: int) -> tuple[Any, ModelRunner]:
            layout = ModelRunner.pool_layout(self.source.config, num_pages=num_pages, page_size=PAGE, dtype="float32")
            kv = torch.full(layout.shape, torch.nan)
            if guesses:
                return kv.numpy(), runner_with_next(self.source, kv)
            return kv.numpy(), ModelRunner(self.source, kv, dtype="float32", attention_backend="cpu", max_loras=2)

        self.drafter = AskNextLayer() if guesses else None
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
        self.answers = {
            room: Answer.of([*pair.prefill.outputs[room][:1], *pair.decode.outputs[room]]) for room in said or ROOMS
        }

    @property
    def came(self) -> tuple[int, int]:
        assert self.drafter is not None
        return self.drafter.came, self.drafter.compared


@pytest.fixture
def served(byte_tokenizer: Tokenizer, make_pair: type[Pair]) -> Any:
    grammars = GrammarThread(lambda: Compiler(byte_tokenizer, VOCAB, [0]))
    yield lambda folder, **options: Served(make_pair, folder, grammars=grammars, **options)
    grammars.close()


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return random_folder(tmp_path_factory.mktemp("models") / "latent", "DeepseekV3", tiny_folder)


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sure_next_layer.write(tmp_path_factory.mktemp("models") / "sure", by_rows)


def test_a_pair_answers_the_same_and_hands_over_one_layer_more(served: Any, latent: Path) -> None:
    """So it does where requests are replayed in mid-stream."""
    plain, guessed = (served(latent, guesses=guesses) for guesses in (False, True))
    assert guessed.answers == plain.answers
    assert guessed.came[1] > 60
    assert (
        guessed.pair.prefill.runner.num_tokens == plain.pair.prefill.runner.num_tokens
    )  # prefixes are found as before
    assert guessed.pair.num_written == plain.pair.num_written
    nbytes = [each.pair.prefill.kv[0].nbytes for each in (plain, guessed)]
    assert nbytes[1] - nbytes[0] == PAGE * plain.source.config.head_dim * 4  # latents of one layer
    said = {room: answer.token_ids[: 1 + room % 8] for room, answer in plain.answers.items()}
    said = {room: tokens for room, tokens in said.items() if len(tokens) < len(plain.answers[room].token_ids)}
    rest = served(latent, guesses=True, said=said).answers
    assert all((*tokens, *rest[room].token_ids) == plain.answers[room].token_ids for room, tokens in said.items())


def test_it_guesses_right_from_the_second_step_on_where_no_row_came(served: Any, sure: Path) -> None:
    """Prefill sends no row here, as no drafter is beside it: it is at the worker that computed the prompt."""
    came, compared = served(sure, guesses=True, params_of=greedy).came
    assert came == compared > 100


def test_a_layer_that_did_not_come_guesses_otherwise_and_changes_no_answer(
    served: Any, latent: Path, make_pair: type[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where only a model's own layers were sent."""
    right = served(latent, guesses=True, params_of=greedy, rules=UNCHECKED)
    write = make_pair._write

    def losing(pair: Pair, side: Any, other: Any, effect: Any) -> Any:
        written = write(pair, side, other, effect)
        last_layer = other.kv.shape[1] * 2 // 3
        other.kv[np.asarray(effect.write.dst), last_layer:] = 0
        return written

    monkeypatch.setattr(make_pair, "_write", losing)
    guessed = served(latent, guesses=True, params_of=greedy, rules=UNCHECKED)
    assert guessed.answers == right.answers
    assert guessed.drafter.guesses != right.drafter.guesses
