"""When Python looks for cyclic garbage, in every process of a platform.

Reference counts free what a request leaves (a test holds that for each API); a search is for the few cycles of what
goes on around requests, such as workers that leave. It stops all streams while it looks at everything that is tracked.
So it is made while nothing runs; beside that, only when so much has come that it may be a leak.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Final

BUSY_GROWTH: Final = 50_000  # objects more than at the last search: some MB; Python's own choice is 700
IDLE_GROWTH: Final = 10_000
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
    """Call it when all is loaded: what is there now is never searched again, and searches become few."""
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


def search_while_idle() -> None:
    """Call it when nothing runs."""
    if growth(gc.get_count(), gc.get_threshold()) >= IDLE_GROWTH:
        gc.collect()


async def search_when_idle(is_idle: Callable[[], bool]) -> None:
    """Look now and then whether nothing runs, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        if is_idle():
            search_while_idle()
