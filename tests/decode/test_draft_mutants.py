"""What goes wrong in verification is seen: mutants of it, each of which changes an answer, fails an audit, or stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_scenes import NewEngine, Serving
from every_kind import Answer, Scripted
from null_runner import expected_output
from stepped_engine import VOCAB, Engine

from diptych.checkpoints.source import open_model
from diptych.engine.schedule import sampled
from diptych.engine.schedule.batch_builder import build_batch
from diptych.engine.schedule.sampling_builder import Place
from diptych.engine.values.batch import ForwardBatch
from diptych.engine.values.request import Request
from diptych.engine.values.token_counts import TokenCounts
from diptych.generation.logprobs import join, of_rows
from diptych.grammars.matcher import GrammarMatcher
from diptych.tokens.tokenizer import Tokenizer

ROOMS = range(1, 7)
NUM_TOKENS = 40
EXPECTED = {room: expected_output([room] * 9, NUM_TOKENS, VOCAB) for room in ROOMS}
Mutate = Callable[[pytest.MonkeyPatch], None]


def answers(engine: Engine) -> dict[int, list[int]]:
    """Run a core whose model reads all that is stored of a request; its books are compared after every step."""
    for room in ROOMS:
        engine.start(room, [room] * 9, NUM_TOKENS)
    engine.run()
    return {room: engine.tokens(room) for room in ROOMS}


# of rows and pages


def rows_that_read_a_later_page(*args: Any, **fields: Any) -> ForwardBatch:
    """Each token of a row finds in the place of its last page the one behind."""
    batch = build_batch(*args, **fields)
    row = int(batch.num_sampled.argmax())
    if batch.num_sampled[row] > 1:
        batch.page_table[row] = np.roll(batch.page_table[row], -1)
    return batch


def rows_that_all_stand_at_one_place(*args: Any, **fields: Any) -> ForwardBatch:
    batch = build_batch(*args, **fields)
    firsts = np.repeat(np.cumsum(batch.extend_lens) - batch.extend_lens, batch.extend_lens)
    is_row = np.repeat(batch.num_sampled > 1, batch.extend_lens)
    return replace(batch, positions=np.where(is_row, batch.positions[firsts], batch.positions))


@pytest.mark.parametrize("build", [rows_that_read_a_later_page, rows_that_all_stand_at_one_place])
def test_a_row_that_is_laid_out_wrongly_changes_answers(new_engine: NewEngine, build: Any) -> None:
    engine = new_engine(drafter=Scripted(EXPECTED), build_batch=build)
    assert answers(engine) != EXPECTED


def without_roll_back(request: Request, drafts: Sequence[int], token_ids: Sequence[int]) -> None:
    """Drafts that did not come true count as computed."""
    request.late_len = len(token_ids) if drafts else 0


def with_a_forgotten_page(request: Request, drafts: Sequence[int], token_ids: Sequence[int]) -> None:
    """The page that only wrong drafts needed is nobody's any more."""
    without_roll_back(request, drafts, token_ids)
    num_wrong = 1 + len(drafts) - len(token_ids)
    request.computed_len -= num_wrong
    if num_wrong:
        request.num_pages = -(-request.computed_len // 4)


@pytest.mark.parametrize("mutant", [without_roll_back, with_a_forgotten_page])
def test_a_roll_back_that_forgets_something_is_seen(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, mutant: Any
) -> None:
    monkeypatch.setattr(sampled, "_roll_back", mutant)
    engine = new_engine(drafter=Scripted(EXPECTED))
    with pytest.raises((AssertionError, IndexError, ValueError)):
        assert answers(engine) == EXPECTED
    engine.abandon()


def test_drafts_that_are_believed_change_answers(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def believed(drafts: Sequence[int], samples: Sequence[int]) -> tuple[int, ...]:
        return (*drafts, samples[-1])

    monkeypatch.setattr(sampled, "verified", believed)
    assert answers(new_engine(drafter=Scripted(EXPECTED))) != EXPECTED


class Stale(Scripted):
    """Guesses for each request what another one, which had its room before, was answered."""

    def _guess(self, request: Request) -> tuple[int, ...]:
        return tuple(EXPECTED[1 + request.room % len(ROOMS)][request.num_output_tokens :][:3])


def test_guesses_of_another_request_cost_time_and_change_nothing(new_engine: NewEngine) -> None:
    engine = new_engine(drafter=Stale(EXPECTED))
    assert answers(engine) == EXPECTED
    assert max(len(output.token_ids) for room in ROOMS for output in engine.outputs[room]) == 1


# of sampling, by a model


@pytest.fixture(scope="module")
def source(tiny_folder: Path) -> Any:
    return open_model(str(tiny_folder))


@pytest.fixture
def serving(new_engine: NewEngine, source: Any, byte_tokenizer: Tokenizer) -> Serving:
    return Serving(new_engine, source, byte_tokenizer)


@pytest.fixture(scope="module")
def plain() -> dict[int, Answer]:
    """Filled by the first test that needs it."""
    return {}


def stale_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenCounts, "with_more", lambda counts, token_ids: (counts.ids, counts.counts))


def only_the_first_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place, "num_output_tokens", property(lambda place: place.request.num_output_tokens))


def masks_of_the_first_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(matcher: GrammarMatcher, mask: Any, row: int, guess: Sequence[int]) -> None:
        for at in range(row, row + 1 + len(guess)):
            matcher.fill_mask(mask, at)

    monkeypatch.setattr(GrammarMatcher, "fill_masks", fill)


def scores_of_the_first_place(monkeypatch: pytest.MonkeyPatch) -> None:
    real = of_rows

    def first(batch: Any, start: int, stop: int, num_top: int) -> Any:
        return join([real(batch, start, start + 1, num_top)] * (stop - start))

    monkeypatch.setattr(sampled, "of_rows", first)


def one_draw_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.engine.schedule import sampling_builder

    real = sampling_builder._behind_drafts

    def repeated(sampling: Any, row_lens: Sequence[int]) -> Any:
        return replace(real(sampling, row_lens), positions=np.repeat(sampling.positions, row_lens))

    monkeypatch.setattr(sampling_builder, "_behind_drafts", repeated)


@pytest.mark.parametrize(
    "mutate",
    [stale_counts, only_the_first_place, masks_of_the_first_place, scores_of_the_first_place, one_draw_for_a_row],
)
def test_a_place_that_is_sampled_as_another_one_changes_answers(
    serving: Serving, plain: dict[int, Answer], monkeypatch: pytest.MonkeyPatch, mutate: Mutate
) -> None:
    plain.update(plain or serving.answers({}))
    told = {room: answer.token_ids for room, answer in plain.items()}
    assert serving.answers(told) == plain
    mutate(monkeypatch)
    assert serving.answers(told) != plain
