"""Stages of which the last one guesses, on tiny random models: the guesses are those that transformers computes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from next_layers import NUM_PAGES, PAGE, TOKENS, Served, guesses_by_transformers, guesses_of, random_folder, with_next
from ranked_model import RankedModel, Shape, write
from torch import Tensor

from diptych.checkpoints.source import ModelSource, open_model
from diptych.kvtransfer.transport import PageWrite


@pytest.fixture(scope="module", params=["DeepseekV3", "Glm4Moe"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def source(family: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> ModelSource:
    folder = random_folder(tmp_path_factory.mktemp("models") / family, family, tiny_folder)
    return with_next(open_model(str(folder)))


def served_on(shape: Shape, source: ModelSource) -> Served:
    def new_runner(source: ModelSource, kv: Tensor) -> RankedModel:
        return RankedModel(source, shape, NUM_PAGES, draft=source.next_layer())

    return Served(source, new_runner)


@pytest.mark.parametrize("shape", [Shape(PAGE, pp=2), Shape(PAGE, tp=2, pp=2)], ids=["two ranks", "four"])
def test_the_last_stage_guesses_what_others_compute(family: str, source: ModelSource, shape: Shape) -> None:
    found = guesses_of(served_on(shape, source), partial(guesses_by_transformers, family))
    assert all(ours == theirs for ours, theirs in found)


def test_its_layer_and_row_are_handed_to_a_worker_without_stages_and_back(family: str, source: ModelSource) -> None:
    """The prompt is computed on stages, goes on elsewhere, and on stages again: wherever it is, guesses are right."""
    first, other, last = (served_on(Shape(PAGE, pp=pp), source) for pp in (2, 1, 2))
    first.compute(TOKENS, 0, 15)
    hand_over(first, other, 15)
    assert other.guess(TOKENS[:16], 4) == guesses_by_transformers(family, TOKENS[:16], 4)
    other.compute(TOKENS, 15, 19, row=True)
    hand_over(other, last, 19)
    assert last.guess(TOKENS[:20], 3) == guesses_by_transformers(family, TOKENS[:20], 3)


def hand_over(one: Served, other: Served, num_tokens: int) -> None:
    """Bring all pages, and the row of the last token."""
    pages = other.table[0, : -(-num_tokens // PAGE)].astype(np.int64)
    assert write(one.runner, other.runner, PageWrite(pages, pages)) > 0
    slot = int(pages[-1]) * PAGE + (num_tokens - 1) % PAGE
    row = one.runner.draft_model.row(slot)
    assert len(row) == 2 * 64
    other.runner.draft_model.put_row(slot, row)


def test_the_first_stage_has_nothing_of_it_in_pages(source: ModelSource) -> None:
    layouts = served_on(Shape(PAGE, pp=2), source).runner.layouts
    assert [[len(region.layers) for region in layout.regions] for layout in layouts] == [[1, 0], [1, 1]]
    assert [layout.regions[1].model_layers for layout in layouts] == [(2,), (2,)]
    for layout in layouts:
        layout.validate()
