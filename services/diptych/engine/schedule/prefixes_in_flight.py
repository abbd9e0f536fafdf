"""Prefixes that are on their way into the cache: of requests that are being computed, or whose KV is being received.

A request that shares a long one of them does better to wait for it than to have it made again, as long as whoever
brings it goes on. Nobody is bound by that: whether it goes on is asked each time, so those who end are waited for no
longer. Pure.

Pages are found by their names (`page_hash`), which cover all that is before them: so the longest common prefix is found
by bisection, however many bring pages and however long their prompts are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from diptych.engine.values.request import Request
from diptych.generation.page_hash import chain_hashes, root_hash

NUM_LOOKED_AT: Final = 2  # of those who have been remembered longest, for each one that is new


@dataclass(frozen=True, slots=True, eq=False)
class PrefixProducer:
    """A request that holds pages, and will share its first `num_pages` when it has them all."""

    request: Request
    num_pages: int
    source: int  # who computes them: an instance; 0: we

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
        producer = PrefixProducer(request, request.num_tokens // self._page_size, source)
        if producer.num_pages:
            self._remembered.append(producer)
        for name in self._names(producer):
            self._producers.setdefault(name, []).append(producer)

    def longest(self, request: Request, source: int = 0) -> PendingPrefix | None:
        """Return who will bring most of the request's prefix from `source`, None if nobody brings any."""
        if not self._producers:
            return None
        names = page_names(request, self._page_size)
        found, low, high = None, 0, min(len(names), request.matchable_len // self._page_size)
        while low < high:  # whoever brings a page brings those before it
            middle = (low + high) // 2
            producer = self._producer_of((source, names[middle]))
            if producer is None:
                high = middle
            else:
                found, low = producer, middle + 1
        return None if found is None else PendingPrefix(found, low)

    def _producer_of(self, name: tuple[int, int]) -> PrefixProducer | None:
        producers = self._producers.get(name, ())
        return next((producer for producer in producers if producer.is_on_its_way), None)

    def _names(self, producer: PrefixProducer) -> Iterator[tuple[int, int]]:
        for name in page_names(producer.request, self._page_size)[: producer.num_pages]:
            yield producer.source, name

    def _forget_ended(self) -> None:
        """Forget those of a few that have ended: no call takes long, and most of those remembered have not."""
        for _ in range(min(NUM_LOOKED_AT, len(self._remembered))):
            producer = self._remembered.popleft()
            if producer.is_on_its_way:
                self._remembered.append(producer)
            else:
                self._forget(producer)

    def _forget(self, producer: PrefixProducer) -> None:
        for name in self._names(producer):
            producers = self._producers[name]
            producers.remove(producer)
            if not producers:
                del self._producers[name]


def common_len(one: Request, other: Request, page_size: int) -> int:
    """Return how many tokens of `one` could be found in whole pages, were `other` computed."""
    names, others = page_names(one, page_size), page_names(other, page_size)
    low, high = 0, min(len(names), len(others), one.matchable_len // page_size)
    while low < high:  # names cover all that is before them
        middle = (low + high) // 2
        low, high = (middle + 1, high) if names[middle] == others[middle] else (low, middle)
    return low * page_size


def page_names(request: Request, page_size: int) -> list[int]:
    """Return the names of the request's whole pages. They are kept with it, for it is asked about again and again."""
    known, num_pages = len(request.page_names), request.num_tokens // page_size
    if known < num_pages:
        previous = request.page_names[-1] if known else root_hash(request.extra_key)
        tokens = request.tokens[known * page_size : num_pages * page_size]
        request.page_names += chain_hashes(previous, tokens, page_size).tolist()
    return request.page_names
