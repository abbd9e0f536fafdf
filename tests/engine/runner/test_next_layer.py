"""The layer that predicts one token more: what it guesses is what transformers computes of the same weights.

An EAGLE head joins the rows before tokens as such a layer does, and is compared with the published architecture.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle_heads import guesses_by_reference, open_both, random_folders, runner_with_head
from next_layers import FAMILIES, Guess, Served, guesses, guesses_of, random_folder, runner_with_next
from safetensors.torch import load_file, save_file

from diptych.engine.runner.hidden_rows import HiddenRows
from diptych.engine.runner.next_layer import CpuNextLayer
from diptych.engine.runner.row_places import RowPlaces
from diptych.engine.values.batch import Bools, ForwardBatch, ForwardMode, OnLayer

GuessAll = Callable[[], list[Guess]]


@pytest.fixture(scope="module", params=[*FAMILIES, "Eagle"])
def guess_all(request: Any, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> GuessAll:
    base = tmp_path_factory.mktemp("models")
    if request.param != "Eagle":
        folder = random_folder(base / "next", request.param, tiny_folder)
        return lambda: guesses(request.param, folder, runner_with_next)
    folders = random_folders(base, tiny_folder)
    source, _ = open_both(folders)
    by_others = partial(guesses_by_reference, folders.head)
    return lambda: guesses_of(Served(source, runner_with_head(folders)), by_others)


def test_it_guesses_what_others_compute(guess_all: GuessAll) -> None:
    assert all(ours == theirs for ours, theirs in guess_all())


def test_of_several_layers_the_first_guesses(tmp_path: Path, tiny_folder: Path) -> None:
    folder = random_folder(tmp_path / "next", "DeepseekV3", tiny_folder)
    settings = json.loads((folder / "config.json").read_text())
    prefix, later = (f"model.layers.{settings['num_hidden_layers'] + i}." for i in (0, 1))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace(prefix, later): -each for name, each in tensors.items() if name.startswith(prefix)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings | {"num_nextn_predict_layers": 2}))
    assert all(ours == theirs for ours, theirs in guesses("DeepseekV3", folder, runner_with_next))


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
    guess_all: GuessAll, break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert any(ours != theirs for ours, theirs in guess_all())
