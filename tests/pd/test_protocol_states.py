"""Every state that one or two rooms can reach: all interleavings, with each thing that can go wrong at every moment.

In each state the rules hold, and from each one it can come to a state where everything has ended and nothing is held.
"""

from __future__ import annotations

import os

import pytest
from simulation.explore import explore
from simulation.two_sides import Budget, TwoSides

from diptych.engine.values.window_pages import WindowPages

DEEP = pytest.mark.skipif(not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="takes a minute")
SINGLE = ((1, 2, 3),)  # a room of one page
CHUNKED = ((1, 2, 3, 1, 2, 3),)  # a room of two pages, computed in two steps
LONG = ((1, 2, 3, 1, 2, 3, 1, 2, 3),)  # a room of three pages
SHORT = WindowPages(1, 2)
STATE = 8  # cells: a page of 4 tokens
SHARING = ((1, 2, 3), (4, 5, 6))  # two rooms of a page each
EQUAL = ((1, 2, 3, 1, 2),) * 2  # two rooms of two pages, the first of which they share


@pytest.mark.parametrize(
    "budget",
    [
        Budget(aborts=1),
        pytest.param(Budget(losses=1), marks=DEEP),
        pytest.param(Budget(crashes=1), marks=DEEP),
        pytest.param(Budget(aborts=1, failures=1), marks=DEEP),
        pytest.param(Budget(aborts=1, damages=1), marks=DEEP),
    ],
    ids=str,
)
def test_a_chunked_room_is_right_in_every_state(budget: Budget) -> None:
    graph = explore(TwoSides(CHUNKED, budget, prefill_pages=3, decode_pages=4))
    assert len(graph.came_from) > 300


@pytest.mark.parametrize(
    "budget",
    [
        Budget(doubled=1),
        Budget(hurries=1),
        Budget(crashes=1),
        pytest.param(Budget(doubled=1, hurries=1), marks=DEEP),
        pytest.param(Budget(losses=1), marks=DEEP),
        pytest.param(Budget(aborts=1, doubled=1), marks=DEEP),
        pytest.param(Budget(aborts=1, losses=1), marks=DEEP),
        pytest.param(Budget(aborts=1, crashes=1), marks=DEEP),
        pytest.param(Budget(aborts=1, doubled=1, hurries=1), marks=DEEP),
    ],
    ids=str,
)
def test_a_room_is_right_in_every_state_when_one_or_two_things_go_wrong(budget: Budget) -> None:
    graph = explore(TwoSides(SINGLE, budget, prefill_pages=3, decode_pages=3))
    assert len(graph.came_from) > 80


@DEEP
def test_a_room_whose_pages_land_in_parts_is_right_in_every_state() -> None:
    graph = explore(TwoSides(SINGLE, Budget(aborts=1), prefill_pages=3, decode_pages=3, num_ranks=(2, 1)))
    assert len(graph.came_from) > 200


@pytest.mark.parametrize(
    "budget",
    [Budget(damages=1), *(pytest.param(each, marks=DEEP) for each in (Budget(aborts=1), Budget(losses=1)))],
    ids=str,
)
def test_a_chunked_room_with_a_state_is_right_in_every_state(budget: Budget) -> None:
    """It is copied behind the first page for others, and behind the prompt for decode."""
    graph = explore(TwoSides(CHUNKED, budget, prefill_pages=6, decode_pages=5, num_state_cells=STATE))
    assert len(graph.came_from) > 150


@pytest.mark.parametrize(
    "budget", [Budget(), *(pytest.param(each, marks=DEEP) for each in (Budget(aborts=1), Budget(losses=1)))], ids=str
)
def test_a_chunked_room_with_windows_is_right_in_every_state(budget: Budget) -> None:
    """What is live behind the prompt is handed over beside its tokens."""
    graph = explore(TwoSides(CHUNKED, budget, prefill_pages=5, decode_pages=5, windows=SHORT))
    assert len(graph.came_from) > (300 if budget != Budget() else 50)


@pytest.mark.parametrize(
    "budget",
    [Budget(), *(pytest.param(each, marks=DEEP) for each in (Budget(aborts=1), Budget(losses=1), Budget(damages=1)))],
    ids=str,
)
def test_a_room_whose_first_page_is_behind_its_windows_is_right_in_every_state(budget: Budget) -> None:
    graph = explore(TwoSides(LONG, budget, prefill_pages=7, decode_pages=7, windows=SHORT))
    assert len(graph.came_from) > 100


@DEEP
def test_two_rooms_that_share_a_page_of_windows_are_right_in_every_state() -> None:
    graph = explore(TwoSides(EQUAL, Budget(), prefill_pages=9, decode_pages=9, windows=SHORT))
    assert len(graph.came_from) > 500


@DEEP
def test_two_rooms_that_begin_with_one_state_are_right_in_every_state() -> None:
    graph = explore(TwoSides(EQUAL, Budget(), prefill_pages=7, decode_pages=6, num_state_cells=STATE))
    assert len(graph.came_from) > 500


@DEEP
@pytest.mark.parametrize("budget", [Budget(), Budget(aborts=1)], ids=str)
def test_two_rooms_that_share_a_page_are_right_in_every_state(budget: Budget) -> None:
    graph = explore(TwoSides(SHARING, budget, prefill_pages=3, decode_pages=2))
    assert len(graph.came_from) > 500


@pytest.mark.parametrize(
    "budget",
    [pytest.param(each, marks=DEEP) for each in (Budget(), Budget(aborts=1), Budget(losses=1), Budget(damages=1))],
    ids=str,
)
def test_two_rooms_of_the_same_prompt_are_right_in_every_state(budget: Budget) -> None:
    graph = explore(TwoSides(EQUAL, budget, prefill_pages=5, decode_pages=5))
    assert len(graph.came_from) > 500
