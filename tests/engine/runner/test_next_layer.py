"""The layer that predicts one token more: what it guesses is what transformers computes of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from next_layers import FAMILIES, guesses_by_transformers, random_folder, runner_with_next, with_next

from diptych.checkpoints.source import open_model
from diptych.engine.runner.hidden_rows import HiddenRows
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.runner.next_layer import CpuNextLayer
from diptych.engine.runner.row_places import RowPlaces
from diptych.engine.values.batch import Bools, DraftBatch, ForwardBatch, ForwardMode, OnLayer

PAGE, NUM_PAGES = 4, 32
TOKENS = [(7 * i + i * i) % 300 for i in range(23)]


class Served:
    """One request, computed step by step."""

    def __init__(self, folder: Path) -> None:
        source = with_next(open_model(str(folder)))
        layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE, dtype="float32")
        self.kv = torch.full(layout.shape, torch.nan)
        self.runner = runner_with_next(source, self.kv)
        self.table = np.arange(1, 13, dtype=np.int32)[None]

    def compute(self, tokens: list[int], start: int, end: int, *, row: bool = False) -> None:
        """Compute a part of a text: of a prompt, or a row whose tokens are all sampled behind."""
        positions = np.arange(start, end)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE if row else ForwardMode.EXTEND,
            input_ids=np.array(tokens[start:end]),
            positions=positions,
            out_slots=self.table[0, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE,
            page_table=self.table,
            seq_lens=np.array([end]),
            extend_lens=np.array([end - start]),
            num_sampled=np.array([end - start if row else 1]),
        )
        self.runner.logits(batch)

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """Guess behind `tokens`, the last of which is not computed yet."""
        newest, position = np.array(tokens[-1:]), np.array([len(tokens) - 1])
        assert self.runner.draft_model is not None
        found = self.runner.draft_model.draft(DraftBatch(newest, position, self.table, np.array([count]), PAGE))
        return found[0].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[tuple[str, Path]]:
    yield request.param, random_folder(tmp_path_factory.mktemp("models") / "next", request.param, tiny_folder)


Guess = tuple[list[int], list[int]]  # what is guessed, and by transformers


def guesses(family: tuple[str, Path]) -> list[Guess]:
    """Behind a prompt in two parts, a row of which three tokens came true, and a guess that was computed before."""
    name, folder = family
    served, found = Served(folder), list[Guess]()

    def guess(num_tokens: int, count: int) -> None:
        behind = TOKENS[:num_tokens]
        found.append((served.guess(behind, count), guesses_by_transformers(name, behind, count)))

    served.compute(TOKENS, 0, 7)
    served.compute(TOKENS, 7, 15)
    guess(16, 4)
    served.compute([*TOKENS[:18], 1, 2], 15, 20, row=True)
    guess(19, 4)
    served.compute(TOKENS, 18, 19, row=True)
    guess(20, 2)
    return found


def test_it_guesses_what_transformers_does(family: tuple[str, Path]) -> None:
    assert all(ours == theirs for ours, theirs in guesses(family))


def stale_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HiddenRows, "keep", lambda rows, kept: None)


def rows_of_a_wrong_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row only the last token's is kept, whichever came true."""

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
    assert any(ours != theirs for ours, theirs in guesses(family))
