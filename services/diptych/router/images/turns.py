"""Who may do at once what holds something for all: so many together, and of one caller a quarter.

Whoever has no name has no share: nobody knows how many they are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from diptych.common.errors import Overloaded
from diptych.router.errors import RateLimited

SHARE: Final = 4  # one caller may have one part in so many
RETRY_AFTER_S: Final = 1


class Places:
    """Places that are refused where there are none."""

    def __init__(self, most: int, what: str) -> None:
        """`what` they are taken by, in words."""
        self._most, self._what = most, what
        self._taken: Counter[str] = Counter()  # by caller; only who has one

    @contextmanager
    def take(self, caller: str) -> Iterator[None]:
        """Hold one. Raises `RateLimited` if the caller has its share, `Overloaded` if there is none."""
        if caller and self._taken[caller] >= max(1, self._most // SHARE):
            words = f"{self._what} of too many requests of {caller!r} already: wait until some are done"
            raise RateLimited(words, retry_after_s=RETRY_AFTER_S)
        if self._taken.total() >= self._most:
            raise Overloaded(f"{self._what} of too many requests: try again soon", retry_after_s=RETRY_AFTER_S)
        self._taken[caller] += 1
        try:
            yield
        finally:
            self._taken[caller] -= 1
            if not self._taken[caller]:
                del self._taken[caller]


class Turns:
    """Turns that are waited for. Used from one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all = asyncio.Semaphore(most)
        self._own: dict[str, asyncio.Semaphore] = {}  # of those who have turns, or wait
        self._num: Counter[str] = Counter()

    @asynccontextmanager
    async def take(self, caller: str) -> AsyncIterator[None]:
        """Wait for the caller's share to have room, then for all."""
        share = max(1, self._most // SHARE) if caller else self._most
        own = self._own.setdefault(caller, asyncio.Semaphore(share))
        self._num[caller] += 1
        try:
            async with own, self._all:
                yield
        finally:
            self._num[caller] -= 1
            if not self._num[caller]:
                del self._num[caller], self._own[caller]
