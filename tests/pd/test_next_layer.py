"""A layer that predicts one token more between a prefill and a decode worker, and where an output moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sure_next_layer
import torch
from draft_models import AskAlways
from eagle_heads import (
    HEAD_DIM,
    AskHead,
    Folders,
    by_keys,
    open_both,
    random_folders,
    runner_with_head,
    sure_folders,
)
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
    return ModelRunner(source, kv, dtype="float32", attention_backend="cpu", max_loras=2, max_requests=16)


@pytest.fixture
def served(byte_tokenizer: Tokenizer, make_pair: type[Pair]) -> Any:
    grammars = GrammarThread(lambda: Compiler(byte_tokenizer, VOCAB, [0]))

    def serve(model: Path | Folders, *, guesses: bool, **options: Any) -> GuessingPair:
        new_drafter: type[AskAlways]
        if isinstance(model, Folders):
            source, (beside, _) = open_model(str(model.model)), open_both(model)
            new_drafter, guessing = AskHead, runner_with_head(model)
        else:
            source = open_model(str(model))
            beside, new_drafter, guessing = with_next(source), AskNextLayer, runner_with_next
        if not guesses:
            return GuessingPair(make_pair, source, plain_runner, None, grammars=grammars, **options)
        return GuessingPair(make_pair, beside, guessing, new_drafter(), grammars=grammars, **options)

    yield serve
    grammars.close()


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return random_folder(tmp_path_factory.mktemp("models") / "latent", "DeepseekV3", tiny_folder)


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sure_next_layer.write(tmp_path_factory.mktemp("models") / "sure", by_rows)


@pytest.fixture(scope="module")
def sure_head(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A head that looks at what it has kept of the token before."""
    return sure_folders(tmp_path_factory.mktemp("models"), by_keys)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Folders:
    return random_folders(tmp_path_factory.mktemp("models"), tiny_folder)


@pytest.mark.integration
@pytest.mark.parametrize("model", ["latent", "head"])
def test_a_pair_answers_the_same_and_hands_over_one_layer_more(
    served: Any, model: str, request: pytest.FixtureRequest
) -> None:
    """So it does where requests are replayed in mid-stream."""
    folder = request.getfixturevalue(model)
    plain, guessed = (served(folder, guesses=guesses) for guesses in (False, True))
    assert guessed.answers == plain.answers
    assert guessed.came[1] > 60
    assert (
        guessed.pair.prefill.runner.num_tokens == plain.pair.prefill.runner.num_tokens
    )  # prefixes are found as before
    assert guessed.pair.num_written == plain.pair.num_written
    nbytes = [each.pair.prefill.kv[0].nbytes for each in (plain, guessed)]
    kept = plain.source.config.head_dim if model == "latent" else 2 * 2 * HEAD_DIM
    assert nbytes[1] - nbytes[0] == PAGE * kept * 4  # of one layer, which is as those of the model
    said = said_in_mid_stream(plain.answers)
    assert go_on(served(folder, guesses=True, said=said).answers, said, plain.answers)


@pytest.mark.integration
def test_a_pair_whose_model_keeps_states_answers_the_same(
    served: Any, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> None:
    folder = random_folder(tmp_path_factory.mktemp("models") / "states", "Qwen3Next", tiny_folder)
    plain, guessed = (served(folder, guesses=guesses) for guesses in (False, True))
    assert guessed.answers == plain.answers
    assert guessed.came[1] > 60
    said = said_in_mid_stream(plain.answers)
    assert go_on(served(folder, guesses=True, said=said).answers, said, plain.answers)


@pytest.mark.parametrize("model", ["sure", "sure_head"])
def test_it_guesses_right_from_the_second_step_on_where_no_row_came(
    served: Any, model: str, request: pytest.FixtureRequest
) -> None:
    """Prefill sends no row here, as no drafter is beside it: it is at the worker that computed the prompt."""
    came, compared = served(request.getfixturevalue(model), guesses=True, params_of=greedy).came
    assert came == compared > 100


def test_a_layer_that_did_not_come_guesses_otherwise_and_changes_no_answer(
    served: Any, head: Folders, make_pair: type[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where only a model's own layers were sent."""
    right = served(head, guesses=True, params_of=greedy, rules=UNCHECKED)
    write = make_pair._write

    def losing(pair: Pair, side: Any, other: Any, effect: Any) -> Any:
        written = write(pair, side, other, effect)
        pages = other.kv.reshape(len(other.kv), -1)
        pages[np.asarray(effect.write.dst), pages.shape[1] * 4 // 5 :] = 0  # behind the model's four layers
        return written

    monkeypatch.setattr(make_pair, "_write", losing)
    guessed = served(head, guesses=True, params_of=greedy, rules=UNCHECKED)
    assert guessed.answers == right.answers
    assert guessed.drafter.guesses != right.drafter.guesses
