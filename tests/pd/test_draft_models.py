"""Draft layers between a prefill and a decode worker: handed over with every page, and nothing beside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_models import AskAlways, runner_with_draft, with_draft
from guessing_pair import PAGE, VOCAB, GuessingPair, Pair, go_on, greedy, said_in_mid_stream

from diptych.checkpoints.source import ChangedModel, ModelSource, keeping_all, open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.grammar_thread import GrammarThread
from diptych.engine.values.transfer_rules import TransferRules
from diptych.grammars.compiler import Compiler
from diptych.tokens.tokenizer import Tokenizer

UNCHECKED = TransferRules(integrity="off")


@pytest.fixture
def served(tiny_folder: Path, byte_tokenizer: Tokenizer, make_pair: type[Pair]) -> Any:
    source = open_model(str(tiny_folder))
    grammars = GrammarThread(lambda: Compiler(byte_tokenizer, VOCAB, [0]))

    def serve(*, guesses: bool, windows: tuple[int, ...] = (), **options: Any) -> GuessingPair:
        main = ChangedModel(source, replace(source.config, windows=windows)) if windows else source
        draft, drafter = (keeping_all(main), AskAlways()) if guesses else (None, None)
        both = main if draft is None else with_draft(main, draft)

        def new_runner(both: ModelSource, kv: torch.Tensor) -> ModelRunner:
            return runner_with_draft(both, draft, kv)

        return GuessingPair(make_pair, both, new_runner, drafter, grammars=grammars, **options)

    yield serve
    grammars.close()


@pytest.mark.integration
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


@pytest.mark.integration
def test_requests_that_are_replayed_in_mid_stream_go_on_as_before(served: Any) -> None:
    whole = served(guesses=False).answers
    said = said_in_mid_stream(whole)
    assert go_on(served(guesses=True, said=said).answers, said, whole)


@pytest.mark.parametrize("windows", [(), (0, 8)], ids=["", "beside windows with pages of their own"])
def test_what_prefill_computed_of_the_draft_layers_guesses_right(served: Any, windows: tuple[int, ...]) -> None:
    guessed = served(guesses=True, params_of=greedy, windows=windows)
    assert guessed.answers == served(guesses=False, params_of=greedy, windows=windows).answers
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
