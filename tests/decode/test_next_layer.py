"""A layer that predicts one token more: the same tokens, scores and ends, and as many right guesses as it can have.

The layers that are right by construction look at the hidden row before a token alone, or at the token alone. So a row
that is stale, or another token's, makes the first one wrong, and a token that is another one the second. Of EAGLE heads
one looks at the row, and one at what it has kept of the token before: stale keys and values make that one wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import eagle_heads
import numpy as np
import pytest
import sure_next_layer
from draft_models import AskAlways
from draft_scenes import FEW_PAGES, ROOMS, NewEngine, Serving, TwoRanks
from every_kind import KINDS, Answer
from next_layers import AskNextLayer, random_folder, runner_with_next, with_next
from torch import Tensor

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.arrays import I64
from diptych.engine.runner.hidden_rows import HiddenRows
from diptych.engine.runner.loaded_model import LoadedModel
from diptych.engine.runner.next_layer import CpuNextLayer
from diptych.engine.runner.row_places import FIRST_OF_STEP, Kept, RowPlaces
from diptych.engine.values.batch import ForwardBatch, ForwardMode, OnLayer
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.tokenizer import Tokenizer

EVERY_KIND = range(1, 2 * len(KINDS) + 1)  # greedy, and seeded
AWAY: dict[str, Any] = {"num_pages": FEW_PAGES, "rooms": ROOMS, "num_slots": 64}  # evicted pages come back


def greedy(room: int) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


class Guesser(NamedTuple):
    """A model, and what guesses for it."""

    alone: ModelSource
    beside: ModelSource  # with its layers
    draft: ModelSource
    new_runner: Callable[[ModelSource, Tensor], Any]
    new_drafter: type[AskAlways]

    @staticmethod
    def next_layer(folder: Path) -> Guesser:
        source = open_model(str(folder))
        return Guesser(source, with_next(source), source.next_layer(), runner_with_next, AskNextLayer)

    @staticmethod
    def head(folders: eagle_heads.Folders) -> Guesser:
        source, new_runner = open_model(str(folders.model)), eagle_heads.runner_with_head(folders)
        return Guesser(source, *eagle_heads.open_both(folders), new_runner, eagle_heads.AskHead)


@pytest.fixture(scope="module")
def guessers(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Callable[[str], Guesser]:
    base = tmp_path_factory.mktemp("models")

    @cache
    def of(name: str) -> Guesser:
        match name:
            case "by_rows" | "by_tokens":
                return Guesser.next_layer(sure_next_layer.write(base / name, getattr(sure_next_layer, name)))
            case "head_by_rows" | "head_by_keys":
                knows = getattr(eagle_heads, name.removeprefix("head_"))
                return Guesser.head(eagle_heads.sure_folders(base / name, knows))
            case "head":
                return Guesser.head(eagle_heads.random_folders(base / name, tiny_folder))
        return Guesser.next_layer(random_folder(base / name, name, tiny_folder))

    return of


class Pair:
    """Serves requests by a model alone, and beside what guesses for it."""

    def __init__(self, new_engine: NewEngine, guesser: Guesser, tokenizer: Tokenizer) -> None:
        self.guesser = guesser
        self.alone = Serving(new_engine, guesser.alone, tokenizer)
        self.beside = Serving(new_engine, guesser.beside, tokenizer)
        self.drafter = guesser.new_drafter()

    def guessed(self, **scene: Any) -> dict[int, Answer]:
        self.drafter = self.guesser.new_drafter()
        scene = {"open_runner": self.guesser.new_runner, "rooms": EVERY_KIND, **scene}
        return self.beside.answers({}, drafter=self.drafter, **scene)

    @property
    def share(self) -> float:
        return self.drafter.came / self.drafter.compared


@pytest.fixture
def pair_of(new_engine: NewEngine, guessers: Any, byte_tokenizer: Tokenizer) -> Callable[[str], Pair]:
    return lambda name: Pair(new_engine, guessers(name), byte_tokenizer)


@pytest.mark.parametrize(
    ("family", "scene"),
    [
        ("DeepseekV3", {}),
        ("Glm4Moe", {}),
        ("DeepseekV3", {"overlap": True}),
        ("Glm4Moe", AWAY),
        ("Qwen3Next", {}),
        ("Qwen3_5Moe", {"overlap": True}),
        ("head", {}),
        ("head", {"overlap": True}),
        ("head", AWAY),
    ],
    ids=[
        *("latents", "keys and values", "overlapped", "retracted", "states", "states overlapped"),
        *("head", "head overlapped", "head retracted"),
    ],
)
def test_no_answer_is_another_one(pair_of: Callable[[str], Pair], family: str, scene: dict[str, Any]) -> None:
    pair = pair_of(family)
    rooms = scene.get("rooms", EVERY_KIND)
    assert pair.guessed(**scene) == pair.alone.answers({}, rooms=rooms)
    assert pair.drafter.compared > 4 * len(rooms)
    assert (pair.beside.num_retractions > 3) == (pair.beside.num_restored > 3) == (scene is AWAY)


@pytest.mark.parametrize("joined", ["by_rows", "by_tokens", "head_by_rows", "head_by_keys"])
@pytest.mark.parametrize("scene", [{}, {"overlap": True}], ids=["alone", "overlapped"])
def test_a_layer_that_knows_what_comes_is_right(
    pair_of: Callable[[str], Pair], joined: str, scene: dict[str, Any]
) -> None:
    pair = pair_of(joined)
    assert pair.guessed(params_of=greedy, **scene) == pair.alone.answers({}, params_of=greedy, rooms=EVERY_KIND)
    if scene and joined != "by_tokens":  # what goes on a prompt is guessed by its last row but one: by nothing
        assert len(EVERY_KIND) > pair.drafter.compared - pair.drafter.came > 0
    else:
        assert pair.drafter.came == pair.drafter.compared > 100


@pytest.mark.parametrize("joined", ["by_rows", "head_by_keys"])
def test_two_ranks(pair_of: Callable[[str], Pair], joined: str) -> None:
    """Each has all rows, and a part of the layer."""
    pair = pair_of(joined)

    def no_draft(source: ModelSource) -> None:
        return None

    with ExitStack() as stack:

        def of(draft_of: Callable[[ModelSource], ModelSource | None]) -> Callable[..., TwoRanks]:
            return lambda source, kv: stack.enter_context(closing(TwoRanks(source, kv, draft_of(source))))

        guessed = pair.guessed(open_runner=of(lambda _: pair.guesser.draft), params_of=greedy)
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


def numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody turns what a head says into the model's words."""
    monkeypatch.setattr(LoadedModel, "likeliest", lambda model, logits: logits.argmax(dim=-1))


def stale_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said has draft layers only where a guess was made behind it."""
    follow = CpuNextLayer.follow

    def of_prompts(layer: CpuNextLayer, batch: ForwardBatch, on_layer: OnLayer | None) -> None:
        if batch.mode is not ForwardMode.DECODE:
            follow(layer, batch, on_layer)

    monkeypatch.setattr(CpuNextLayer, "follow", of_prompts)


@pytest.mark.parametrize(
    ("joined", "break_it"),
    [
        ("by_rows", stale),
        ("by_rows", shifted),
        ("head_by_rows", stale),
        ("head_by_rows", shifted),
        ("head_by_rows", numbers_of_its_own),
        ("head_by_keys", stale_keys),
    ],
)
def test_what_is_broken_makes_it_guess_wrong_and_changes_no_answer(
    pair_of: Callable[[str], Pair],
    joined: str,
    break_it: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = pair_of(joined)
    expected = pair.alone.answers({}, rooms=EVERY_KIND)
    whole = (pair.guessed() == expected) and pair.share
    break_it(monkeypatch)
    assert pair.guessed() == expected
    assert pair.share < 0.9 * whole
