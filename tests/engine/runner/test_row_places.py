"""Where hidden rows are kept: as many as there is room for, and each for the token that it belongs to."""

from __future__ import annotations

import numpy as np

from diptych.engine.runner.row_places import FIRST_OF_STEP, NOBODYS, NUM_KEPT, RowPlaces
from diptych.engine.values.batch import ForwardBatch, ForwardMode

PAGE = 8


def step(pages: list[list[int]], starts: list[int], lens: list[int], *, rows: bool = True) -> ForwardBatch:
    """Return a step of requests with such pages; prompts, unless they are `rows`."""
    extend_lens, table = np.array(lens), np.array(pages, np.int32)
    positions = np.concatenate([np.arange(start, start + each) for start, each in zip(starts, lens, strict=True)])
    return ForwardBatch(
        mode=ForwardMode.DECODE if rows else ForwardMode.EXTEND,
        input_ids=np.zeros_like(positions),
        positions=positions,
        out_slots=np.zeros_like(positions),  # also where nothing is written
        page_table=table,
        seq_lens=np.array(starts) + extend_lens,
        extend_lens=extend_lens,
        num_sampled=extend_lens if rows else np.ones_like(extend_lens),
    )


def test_a_token_has_the_row_before_it_in_its_step_or_in_an_earlier_one() -> None:
    places = RowPlaces(PAGE)
    prompt = step([[1, 2], [3, 4]], [0, 0], [10, 3], rows=False)
    expected = [NOBODYS, *range(FIRST_OF_STEP, FIRST_OF_STEP + 9), NOBODYS, FIRST_OF_STEP + 10, FIRST_OF_STEP + 11]
    assert places.begin(prompt).tolist() == expected
    kept = places.keep(prompt)
    assert (kept.places_of_step - FIRST_OF_STEP).tolist() == [7, 8, 9, 11, 12]  # a page's end, and the last two
    rows = step([[1, 2], [3, 4]], [10, 3], [3, 1])
    assert places.begin(rows).tolist() == [kept.places[2], FIRST_OF_STEP, FIRST_OF_STEP + 1, kept.places[4]]
    kept = places.keep(rows)
    assert len(kept.places) == 4  # whichever of them comes true
    assert places.before(step([[1, 2]], [11], [1])).tolist() == [kept.places[0]]
    assert places.before(step([[1, 5]], [8], [1])).tolist() == [1]  # of another request, behind the same page
    assert places.before(step([[6, 7]], [8], [1])).tolist() == [NOBODYS]


def test_no_more_is_kept_than_there_is_room_for() -> None:
    places, num_requests = RowPlaces(PAGE), 512
    for first in range(0, NUM_KEPT + num_requests, num_requests):
        batch = step([[1 + first + row] for row in range(num_requests)], [0] * num_requests, [1] * num_requests)
        places.begin(batch)
        kept = places.keep(batch)
        assert 0 < kept.places.min() <= kept.places.max() <= NUM_KEPT
    assert places.before(step([[1]], [1], [1])).tolist() == [NOBODYS]  # it was the first
    assert places.before(step([[1 + NUM_KEPT]], [1], [1])).tolist() == [1]
