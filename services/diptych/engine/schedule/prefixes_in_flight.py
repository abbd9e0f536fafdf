"""Prefixes that are on their way into the cache: of requests that are being computed, or whose KV is being received.

A request that shares a long one of them does better to wait for it than to have it made again, as long as whoever
brings it goes on. Nobody is bound by that: whether it goes on is asked each time, so those who end are waited for no
longer. Pure.

Pages are found by their names (`page_hash`), which cover all that is before them: so the longest common prefix is found
by bisection, however many bring pages and however long their prompts are. Only some pages of each are looked up, as a
prompt of many tokens has many pages; between two of these, names are compared with those of whoever brings the first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from diptych.engine.values.request import Request, page_names

STRIDE: Final = 32  # pages from one that is looked up to the next
NUM_LOOKED_AT: Final = 2  # of those who have been remembered longest, for each one that is new


@dataclass(frozen=True, slots=True, eq=False)
class PrefixProducer:
    """A request that holds pages, and will share its first `num_pages` when it has them all."""

    request: Request
    num_pages: int
    keys: Sequence[tuple[int, int]]  # of pages that are looked up: who computes them (0: we), and their names

    @property
    def is_on_its_way(self) -> bool:
        return self.produces(self.num_pages)

    def produces(self, num_pages: int) -> bool:
        """Whether it goes on, and has not shared so many pages yet."""
        node = self.request.node
        return node is not None and not self.request.has_ended and node.end < num_pages


@dataclass(frozen=True, slots=True)
class PendingPrefix:
    """What somebody will bring of another request's prefix, and for how long that is waited for."""

    producer: PrefixProducer
    num_pages: int  # that the other one can reuse
    until_s: float = math.inf

    def is_over(self, now_s: float) -> bool:
        return now_s >= self.until_s or not self.producer.produces(self.num_pages)


class PrefixesInFlight:
    """Those who bring prefixes, by the names of the pages."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._producers: dict[tuple[int, int], list[PrefixProducer]] = {}  # by source and name; none is empty
        self._remembered: deque[PrefixProducer] = deque()

    def __len__(self) -> int:
        """How many are remembered; some may have ended."""
        return len(self._remembered)

    def add(self, request: Request, source: int = 0) -> None:
        """Take note of a request that has got its pages."""
        self._forget_ended()
        num_pages = request.num_tokens // self._page_size
        if not num_pages:
            return
        keys = [(source, name) for name in page_names(request, self._page_size)[:num_pages:STRIDE]]
        producer = PrefixProducer(request, num_pages, keys)
        self._remembered.append(producer)
        for key in keys:
            self._producers.setdefault(key, []).append(producer)

    def longest(self, request: Request, source: int = 0) -> PendingPrefix | None:
        """Return who will bring most of the request's prefix from `source`, None if nobody brings any."""
        if not self._producers:
            return None
        names = page_names(request, self._page_size)
        if not names or (source, names[0]) not in self._producers:
            return None
        most = min(len(names), request.matchable_len // self._page_size)
        low, high = 0, -(-most // STRIDE)  # looked up pages
        while low < high:  # whoever brings a page brings those before it
            middle = (low + high) // 2
            if any(self._producers_of((source, names[middle * STRIDE]))):
                low = middle + 1
            else:
                high = middle
        if not low:
            return None
        start = (low - 1) * STRIDE
        return self._longest_of(self._producers_of((source, names[start])), names, start, min(most, low * STRIDE))

    def _producers_of(self, name: tuple[int, int]) -> Iterator[PrefixProducer]:
        return (producer for producer in self._producers.get(name, ()) if producer.is_on_its_way)

    def _longest_of(
        self, producers: Iterator[PrefixProducer], names: Sequence[int], start: int, most: int
    ) -> PendingPrefix | None:
        """Return which of those who bring page `start` brings most, up to page `most`; of equals the first."""
        best: PendingPrefix | None = None
        for producer in producers:
            others = page_names(producer.request, self._page_size)
            num_pages = _num_common(names, others, start, min(most, producer.num_pages))
            if best is None or num_pages > best.num_pages:
                best = PendingPrefix(producer, num_pages)
            if num_pages == most:
                break
        return best

    def _forget_ended(self) -> None:
        """Forget those of a few that have ended: no call takes long, and most of those remembered have not."""
        for _ in range(min(NUM_LOOKED_AT, len(self._remembered))):
            producer = self._remembered.popleft()
            if producer.is_on_its_way:
                self._remembered.append(producer)
            else:
                self._forget(producer)

    def _forget(self, producer: PrefixProducer) -> None:
        for key in producer.keys:
            producers = self._producers[key]
            producers.remove(producer)
            if not producers:
                del self._producers[key]


def common_len(one: Request, other: Request, page_size: int) -> int:
    """Return how many tokens of `one` could be found in whole pages, were `other` computed."""
    names, others = page_names(one, page_size), page_names(other, page_size)
    return _num_common(names, others, 0, min(len(names), len(others), one.matchable_len // page_size)) * page_size


def _num_common(names: Sequence[int], others: Sequence[int], low: int, high: int) -> int:
    """Return how many pages both have in common, of which `low` are known to be, and `high` at most."""
    while low < high:  # names cover all that is before them
        middle = (low + high) // 2
        low, high = (middle + 1, high) if names[middle] == others[middle] else (low, middle)
    return low
