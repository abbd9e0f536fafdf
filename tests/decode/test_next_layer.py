"""A layer that predicts one token more: the same tokens, scores and ends, and as many right guesses as it can have.

The layers that are right by construction look at the hidden row before a token alone, or at the token alone. So a row
that is stale, or another token's, makes the first one wrong, and a token that is another one the second.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sure_next_layer
from draft_scenes import FEW_PAGES, ROOMS, NewEngine, Serving, TwoRanks
from every_kind import KINDS, Answer
from next_layers import AskNextLayer, random_folder, runner_with_next, with_next
from sure_next_layer import by_rows, by_tokens

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.arrays import I64
from diptych.engine.runner.hidden_rows import HiddenRows
from diptych.engine.runner.row_places import FIRST_OF_STEP, Kept, RowPlaces
from diptych.engine.values.batch import ForwardBatch
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.tokenizer import Tokenizer

EVERY_KIND = range(1, 2 * len(KINDS) + 1)  # greedy, and seeded
AWAY: dict[str, Any] = {"num_pages": FEW_PAGES, "rooms": ROOMS, "num_slots": 64}  # evicted pages come back


def greedy(room: int) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    random = {name: random_folder(base / name, name, tiny_folder) for name in ("DeepseekV3", "Glm4Moe")}
    sure = {joined.__name__: sure_next_layer.write(base / joined.__name__, joined) for joined in (by_rows, by_tokens)}
    return random | sure


class Pair:
    """Serves requests by a model alone, and beside its next layer."""

    def __init__(self, new_engine: NewEngine, source: ModelSource, tokenizer: Tokenizer) -> None:
        self.alone = Serving(new_engine, source, tokenizer)
        self.beside = Serving(new_engine, with_next(source), tokenizer)
        self.drafter = AskNextLayer()

    def guessed(self, **scene: Any) -> dict[int, Answer]:
        self.drafter = AskNextLayer()
        scene = {"open_runner": runner_with_next, "rooms": EVERY_KIND, **scene}
        return self.beside.answers({}, drafter=self.drafter, **scene)

    @property
    def share(self) -> float:
        return self.drafter.came / self.drafter.compared


@pytest.fixture
def pair_of(new_engine: NewEngine, folders: dict[str, Path], byte_tokenizer: Tokenizer) -> Callable[[str], Pair]:
    return lambda name: Pair(new_engine, open_model(str(folders[name])), byte_tokenizer)


@pytest.mark.parametrize(
    ("family", "scene"),
    [("DeepseekV3", {}), ("Glm4Moe", {}), ("DeepseekV3", {"overlap": True}), ("Glm4Moe", AWAY)],
    ids=["latents", "keys and values", "overlapped", "retracted"],
)
def test_no_answer_is_another_one(pair_of: Callable[[str], Pair], family: str, scene: dict[str, Any]) -> None:
    pair = pair_of(family)
    rooms = scene.get("rooms", EVERY_KIND)
    assert pair.guessed(**scene) == pair.alone.answers({}, rooms=rooms)
    assert pair.drafter.compared > 4 * len(rooms)
    assert (pair.beside.num_retractions > 3) == (pair.beside.num_restored > 3) == (scene is AWAY)


@pytest.mark.parametrize("joined", ["by_rows", "by_tokens"])
@pytest.mark.parametrize("scene", [{}, {"overlap": True}], ids=["alone", "overlapped"])
def test_a_layer_that_knows_what_comes_is_right(
    pair_of: Callable[[str], Pair], joined: str, scene: dict[str, Any]
) -> None:
    pair = pair_of(joined)
    assert pair.guessed(params_of=greedy, **scene) == pair.alone.answers({}, params_of=greedy, rooms=EVERY_KIND)
    if scene and joined == "by_rows":  # what goes on a prompt is guessed by its last row but one: by nothing
        assert len(EVERY_KIND) > pair.drafter.compared - pair.drafter.came > 0
    else:
        assert pair.drafter.came == pair.drafter.compared > 100


def test_two_ranks(pair_of: Callable[[str], Pair]) -> None:
    """Each has all rows, and a part of the layer."""
    pair = pair_of("by_rows")

    def no_draft(source: ModelSource) -> None:
        return None

    with ExitStack() as stack:

        def of(draft_of: Callable[[ModelSource], ModelSource | None]) -> Callable[..., TwoRanks]:
            return lambda source, kv: stack.enter_context(closing(TwoRanks(source, kv, draft_of(source))))

        guessed = pair.guessed(open_runner=of(lambda source: source.next_layer()), params_of=greedy)
        assert guessed == pair.alone.answers({}, open_runner=of(no_draft), rooms=EVERY_KIND, params_of=greedy)
    assert pair.drafter.came == pair.drafter.compared > 100


def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is never there."""
    monkeypatch.setattr(HiddenRows, "keep", lambda rows, kept: None)


def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is given its own row."""
    begin = RowPlaces.begin

    def later(places: RowPlaces, batch: ForwardBatch) -> I64:
        begin(places, batch)
        return FIRST_OF_STEP + np.arange(len(batch.input_ids))

    def kept_before(places: RowPlaces, batch: ForwardBatch) -> Kept:
        kept = keep(places, batch)
        return Kept(np.maximum(kept.places_of_step - 1, FIRST_OF_STEP), kept.places)

    keep = RowPlaces.keep
    monkeypatch.setattr(RowPlaces, "begin", later)
    monkeypatch.setattr(RowPlaces, "keep", kept_before)


@pytest.mark.parametrize("break_it", [stale, shifted])
def test_rows_of_others_make_it_guess_wrong_and_change_no_answer(
    pair_of: Callable[[str], Pair], break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("by_rows")
    expected = pair.alone.answers({}, rooms=EVERY_KIND)
    whole = (pair.guessed() == expected) and pair.share
    break_it(monkeypatch)
    assert pair.guessed() == expected
    assert pair.share < 0.9 * whole
