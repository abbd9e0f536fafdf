"""A layer that predicts one token more between a prefill and a decode worker, and where an output moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sure_next_layer
import torch
from guessing_pair import PAGE, VOCAB, GuessingPair, Pair, go_on, greedy, said_in_mid_stream
from next_layers import AskNextLayer, random_folder, runner_with_next, with_next
from sure_next_layer import by_rows

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.grammar_thread import GrammarThread
from diptych.engine.values.transfer_rules import TransferRules
from diptych.grammars.compiler import Compiler
from diptych.tokens.tokenizer import Tokenizer

UNCHECKED = TransferRules(integrity="off")


def plain_runner(source: ModelSource, kv: torch.Tensor) -> ModelRunner:
    return ModelRunner(source, kv, dtype="float32", attention_backend="cpu", max_loras=2)


@pytest.fixture
def served(byte_tokenizer: Tokenizer, make_pair: type[Pair]) -> Any:
    grammars = GrammarThread(lambda: Compiler(byte_tokenizer, VOCAB, [0]))

    def serve(folder: Path, *, guesses: bool, **options: Any) -> GuessingPair:
        source = open_model(str(folder))
        drafter = AskNextLayer() if guesses else None
        new_runner = runner_with_next if guesses else plain_runner
        source = with_next(source) if guesses else source
        return GuessingPair(make_pair, source, new_runner, drafter, grammars=grammars, **options)

    yield serve
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
    said = said_in_mid_stream(plain.answers)
    assert go_on(served(latent, guesses=True, said=said).answers, said, plain.answers)


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
