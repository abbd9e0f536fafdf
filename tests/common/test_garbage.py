from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from diptych.common.garbage import (
    BUSY_GROWTH,
    IDLE_GROWTH,
    OLDER_AFTER,
    WHOLE_EVERY,
    IdleSearches,
    garbage_postponed,
    growth,
)


def test_garbage_is_searched_for_again_when_all_is_imported_or_that_failed() -> None:
    with garbage_postponed():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), garbage_postponed():
        raise ImportError
    assert gc.isenabled()


def test_objects_count_that_have_come_and_not_gone_since_the_last_whole_search() -> None:
    thresholds = (BUSY_GROWTH, 20, 20)
    assert growth((0, 0, 0), thresholds) == 0
    assert growth((123, 0, 0), thresholds) == 123
    assert growth((123, 2, 0), thresholds) == 123 + 2 * BUSY_GROWTH
    assert growth((123, 2, 1), thresholds) == 123 + 22 * BUSY_GROWTH


def test_once_nothing_runs_older_objects_are_searched_before_python_would() -> None:
    assert growth((0, OLDER_AFTER, 0), (BUSY_GROWTH, OLDER_AFTER, OLDER_AFTER)) > IDLE_GROWTH


ENOUGH = 1000


class Cyclic:
    """Something that only a search frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def _seldom_searched() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(10**9, 10**9, 10**9)
    gc.collect()
    yield
    gc.set_threshold(*thresholds)
    gc.freeze()  # as all tests have what was there before them


@pytest.mark.usefixtures("_seldom_searched")
def test_garbage_goes_while_nothing_runs_once_enough_has_come_with_it() -> None:
    searches, garbage = IdleSearches(ENOUGH), weakref.ref(Cyclic())
    searches.search()
    assert garbage() is not None
    others = come()
    searches.search()
    assert garbage() is None
    assert len(others) == ENOUGH


@pytest.mark.usefixtures("_seldom_searched")
def test_what_becomes_garbage_after_it_outlived_a_search_goes_with_the_next_among_all() -> None:
    searches, cyclic, others = IdleSearches(ENOUGH), Cyclic(), [come()]
    searches.search()
    garbage = weakref.ref(cyclic)
    del cyclic
    for _ in range(WHOLE_EVERY - 2):
        others.append(come())
        searches.search()
        assert garbage() is not None
    others.append(come())
    searches.search()
    assert garbage() is None


def come() -> list[list[object]]:
    """Return objects enough for a search."""
    return [[] for _ in range(ENOUGH)]
