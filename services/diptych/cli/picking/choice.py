"""Which router a gateway sends a request to, and which ones it tries after that. Pure.

Any router is right: each chooses the pair of workers by the same policies, and knows the same caches and loads. So
what is left is that a session stays where its requests are known, and that routers have as much to do as each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from heapq import nsmallest
from typing import Final

from diptych.router.choose.pools import uniform

MAX_ENDPOINTS: Final = 4  # that are told to a gateway: who fails so many times has other troubles


class Routers:
    """The endpoints that take requests, and how many requests each has by this picker."""

    def __init__(self) -> None:
        self._there: frozenset[str] = frozenset()
        self._open: Counter[str] = Counter()

    def are(self, endpoints: Collection[str]) -> None:
        """Take these in place of those of before. What is counted stays counted: requests end where they are."""
        self._there = frozenset(endpoints)

    def pick(self, subset: Collection[str] | None, session: str, request_id: str) -> tuple[str, ...]:
        """Return where a request goes, best first; none: nobody may serve it. `subset`: only to these; None: to any.

        Sessions go by rendezvous hashing: a router that comes takes only its part of them, one that goes leaves the
        others where they are. Others go to who has the fewest.
        """
        allowed = self._there if subset is None else self._there & frozenset(subset)
        key = f"session {session}" if session else request_id
        counts = Counter[str]() if session else self._open
        ranked = [(counts[each], -uniform(key, each), each) for each in allowed]  # one digest for each of them
        return tuple(each for _, _, each in nsmallest(MAX_ENDPOINTS, ranked))

    def begin(self, endpoint: str) -> None:
        self._open[endpoint] += 1

    def end(self, endpoint: str) -> None:
        self._open[endpoint] -= 1
        if not self._open[endpoint]:
            del self._open[endpoint]

    def open(self, endpoint: str) -> int:
        return self._open[endpoint]
