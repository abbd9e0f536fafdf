"""A model that guesses for one with layers that keep less than all tokens: windows with pages of their own, states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import AskAlways, runner_with_draft, with_draft
from draft_scenes import ROOMS, NewEngine, OpenRunner, Serving
from eagle_heads import AskHead, open_both, random_folders, runner_with_head
from every_kind import KINDS, Answer

from diptych.checkpoints.source import ChangedModel, ModelSource, keeping_all, open_model
from diptych.engine.runner import draft_model
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.tokenizer import Tokenizer

EVERY_KIND = range(1, 2 * len(KINDS) + 1)  # greedy, and seeded


def greedy(room: int) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


class Guessing:
    """Serves requests by a model beside one that guesses for it."""

    def __init__(self, new_engine: NewEngine, tokenizer: Tokenizer) -> None:
        self._new_engine = new_engine
        self._tokenizer = tokenizer
        self.drafter: AskAlways = AskAlways()
        self.num_retractions = self.num_restored = 0

    def alone(self, source: ModelSource, **scene: Any) -> dict[int, Answer]:
        return Serving(self._new_engine, source, self._tokenizer).answers({}, **scene)

    def beside(self, source: ModelSource, draft: ModelSource, **scene: Any) -> dict[int, Answer]:
        def opened(source: ModelSource, kv: torch.Tensor) -> Any:
            return runner_with_draft(source, draft, kv)

        self.drafter = AskAlways()
        return self.served(with_draft(source, draft), opened, **scene)

    def served(self, source: ModelSource, open_runner: OpenRunner, **scene: Any) -> dict[int, Answer]:
        """`source` has layers of what guesses."""
        serving = Serving(self._new_engine, source, self._tokenizer)
        found = serving.answers({}, drafter=self.drafter, open_runner=open_runner, **scene)
        self.num_retractions, self.num_restored = serving.num_retractions, serving.num_restored
        return found


@pytest.fixture
def guessing(new_engine: NewEngine, byte_tokenizer: Tokenizer) -> Guessing:
    return Guessing(new_engine, byte_tokenizer)


@pytest.fixture
def windowed(tiny_folder: Path) -> ModelSource:
    """The second of its two layers sees eight tokens."""
    plain = open_model(str(tiny_folder))
    return ChangedModel(plain, replace(plain.config, windows=(0, 8)))


@pytest.mark.parametrize(("kind", "few_pages"), [("windows", 40), ("unlike windows", 48), ("states", 22)])
@pytest.mark.parametrize("is_short", [False, True])
def test_no_answer_is_another_one(
    guessing: Guessing,
    windowed: ModelSource,
    tiny_folder: Path,
    request: pytest.FixtureRequest,
    kind: str,
    few_pages: int,
    is_short: bool,
) -> None:
    folders = {"unlike windows": "tiny_wide_folder", "states": "tiny_recurrent_folder"}
    source = open_model(str(request.getfixturevalue(folders[kind]))) if kind in folders else windowed
    rooms = range(1, 33) if is_short else EVERY_KIND
    scene: dict[str, Any] = {"num_pages": few_pages} if is_short else {"overlap": True}
    found = guessing.beside(source, open_model(str(tiny_folder)), rooms=rooms, **scene)
    assert found == guessing.alone(source, rooms=rooms)
    assert guessing.drafter.compared > len(rooms)
    assert (guessing.num_retractions > 0) == is_short


def test_a_head_beside_states_changes_no_answer(
    guessing: Guessing, tiny_recurrent_folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    folders = random_folders(tmp_path, tiny_folder)._replace(model=tiny_recurrent_folder)
    served, head = open_both(folders)
    guessing.drafter = AskHead()
    found = guessing.served(served, runner_with_head(folders), rooms=EVERY_KIND, overlap=True)
    assert head.config.joins_rows
    assert found == guessing.alone(open_model(str(tiny_recurrent_folder)), rooms=EVERY_KIND)
    assert guessing.drafter.compared > len(EVERY_KIND)


def test_a_model_that_guesses_for_itself_is_right_wherever_the_pages_of_its_text_were(
    guessing: Guessing, windowed: ModelSource
) -> None:
    """Its own layers lie beside those of the text, which no window gives up."""
    scene: dict[str, Any] = {"num_pages": 40, "num_slots": 96, "rooms": ROOMS, "params_of": greedy}
    guessing.beside(windowed, keeping_all(windowed), **scene)
    assert guessing.num_retractions > 0
    assert guessing.num_restored > 3
    assert guessing.drafter.came == guessing.drafter.compared > 100


def test_layers_that_lie_in_pages_of_a_window_guess_wrong(
    guessing: Guessing, windowed: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = guessing.alone(windowed, rooms=EVERY_KIND)
    monkeypatch.setattr(draft_model, "known", lambda batch, draft: batch.of_group(1 if batch.window_groups else 0))
    assert guessing.beside(windowed, keeping_all(windowed), rooms=EVERY_KIND) == plain
    assert guessing.drafter.came < guessing.drafter.compared / 2
