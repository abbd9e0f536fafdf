from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from diptych.common.garbage import BUSY_GROWTH, IDLE_GROWTH, garbage_postponed, pays_while_idle, search_while_idle


def test_garbage_is_searched_for_again_when_all_is_imported_or_that_failed() -> None:
    with garbage_postponed():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), garbage_postponed():
        raise ImportError
    assert gc.isenabled()


def test_while_nothing_runs_a_search_waits_until_enough_has_come_since_the_last() -> None:
    assert not pays_while_idle((0, 0, 0))
    assert not pays_while_idle((IDLE_GROWTH - 1, 0, 0))
    assert pays_while_idle((IDLE_GROWTH, 0, 0))


def test_what_outlived_a_search_among_the_young_is_looked_at_once_nothing_runs() -> None:
    assert BUSY_GROWTH > IDLE_GROWTH
    assert pays_while_idle((0, 1, 0))
    assert pays_while_idle((0, 0, 1))


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


@pytest.mark.usefixtures("_seldom_searched")
def test_garbage_goes_while_nothing_runs_once_enough_has_come_with_it() -> None:
    garbage = weakref.ref(Cyclic())
    search_while_idle()
    assert garbage() is not None
    others = [[] for _ in range(IDLE_GROWTH)]
    search_while_idle()
    assert garbage() is None
    assert len(others) == IDLE_GROWTH
