"""The layer that predicts one token more: what it guesses is what transformers computes of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from next_layers import FAMILIES, guesses, random_folder, runner_with_next

from diptych.engine.runner.hidden_rows import HiddenRows
from diptych.engine.runner.next_layer import CpuNextLayer
from diptych.engine.runner.row_places import RowPlaces
from diptych.engine.values.batch import Bools, ForwardBatch, ForwardMode, OnLayer


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> tuple[str, Path]:
    return request.param, random_folder(tmp_path_factory.mktemp("models") / "next", request.param, tiny_folder)


def test_it_guesses_what_transformers_does(family: tuple[str, Path]) -> None:
    assert all(ours == theirs for ours, theirs in guesses(*family, runner_with_next))


def stale_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HiddenRows, "keep", lambda rows, kept: None)


def rows_of_a_wrong_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last token's is kept of a row, whichever came true."""

    def last(places: RowPlaces, batch: ForwardBatch) -> Bools:
        is_kept = np.zeros(len(batch.input_ids), np.bool_)
        is_kept[np.cumsum(batch.extend_lens) - 1] = True
        return is_kept

    monkeypatch.setattr(RowPlaces, "_is_kept", last)


def stale_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a guess has written stays: no row is computed once more."""
    follow = CpuNextLayer.follow

    def of_prompts(layer: CpuNextLayer, batch: ForwardBatch, on_layer: OnLayer | None) -> None:
        if batch.mode is not ForwardMode.DECODE:
            follow(layer, batch, on_layer)

    monkeypatch.setattr(CpuNextLayer, "follow", of_prompts)


@pytest.mark.parametrize("break_it", [stale_rows, rows_of_a_wrong_guess, stale_cache])
def test_what_is_stale_is_guessed_by(
    family: tuple[str, Path], break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert any(ours != theirs for ours, theirs in guesses(*family, runner_with_next))
