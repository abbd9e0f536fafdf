"""When Python looks for cyclic garbage, in every process of a platform.

Reference counts free what a request leaves (a test holds that for each API); a search is for the few cycles of what
goes on around requests, such as workers that leave. It stops all streams while it looks at everything that is tracked.
So one among all that is not young is made while nothing runs, before it is due while something does.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Final

BUSY_GROWTH: Final = 20_000  # objects more than at the last search: a few MB at most; Python's own choice is 700
IDLE_GROWTH: Final = 10 * BUSY_GROWTH  # since the last search while nothing ran; older ones are due at twice that
WHOLE_EVERY: Final = 20  # searches while nothing runs, of which one is among all objects
OLDER_AFTER: Final = 20  # searches among younger objects for each among older ones
LOOK_S: Final = 1.0  # between two looks whether anything runs


@contextlib.contextmanager
def garbage_postponed() -> Iterator[None]:
    """Do not search while modules are imported: what they make stays, and searches would take a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spare_what_stays() -> None:
    """Call it when all is loaded: what is there now is seldom searched again, and searches are few."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(BUSY_GROWTH, OLDER_AFTER, OLDER_AFTER)


def growth(counts: tuple[int, int, int], thresholds: tuple[int, int, int]) -> int:
    """Return how many objects have come since the last whole search, at most.

    `counts` are those of `gc.get_count`: objects that have come and not gone since the last search among the young;
    such searches since the last among older ones; and those. Each began when its threshold was passed.
    """
    young, searches, older_searches = counts
    each, before_older, _ = thresholds
    return young + each * (searches + before_older * older_searches)


class IdleSearches:
    """Searches while nothing runs. What outlives one stays, as a rule: each `WHOLE_EVERY`th looks at it again."""

    def __init__(self, least: int = IDLE_GROWTH) -> None:
        """`least`: objects that have come, for a search."""
        self._least = least
        self._num_searches = 0

    def search(self) -> None:
        """Call it when nothing runs: it looks at what has come since the last time, if that is enough."""
        if growth(gc.get_count(), gc.get_threshold()) < self._least:
            return
        self._num_searches += 1
        if self._num_searches % WHOLE_EVERY == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()


async def search_when_idle(is_idle: Callable[[], bool]) -> None:
    """Look now and then whether nothing runs, until cancelled."""
    import asyncio  # schedulers and most commands have no loop

    searches = IdleSearches()
    while True:
        await asyncio.sleep(LOOK_S)
        if is_idle():
            searches.search()
