"""What listeners are told of a worker's cached pages: each a snapshot first, then changes, in numbered messages.

A listener that has applied every message up to one without `more` has exactly the worker's set. One that misses a
number can't know what it lacks; it asks to start again, which costs the worker's scheduler nothing.
A slow listener gets fewer and larger messages, and what waits for it is bounded by the size of the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diptych.engine.cache.cache_changes import CacheChanges, CacheDelta
from diptych.engine.cache.tier import POOL

MAX_HASHES: Final = 16384  # a message; 128 KiB


@dataclass(frozen=True, slots=True)
class KvMessage:
    """One message to one listener."""

    sequence: int  # 1, 2, ...
    delta: CacheDelta
    more: bool = False  # the rest of this news follows at once


class KvFeed:
    """One listener's news."""

    def __init__(self, cached: Mapping[int, int]) -> None:
        """`cached`: the level of each page."""
        self._changes = CacheChanges()
        self._sequence = 0
        self._announced = False  # that more follows
        self.start_again(cached)

    def start_again(self, cached: Mapping[int, int]) -> None:
        self._changes.clear()
        for level, hashes in itertools.groupby(cached, key=cached.__getitem__):
            self._changes.store(hashes, level)

    def add(self, delta: CacheDelta, before: Mapping[int, int]) -> None:
        """`before`: the levels of what was cached, of the pages that are removed or stored."""
        if delta.cleared:
            self._changes.clear()
        for level, gone in itertools.groupby(delta.removed, key=lambda each: before.get(each, POOL)):
            self._changes.remove(gone, level)
        for level, hashes in delta.placed():
            if before.keys().isdisjoint(hashes):
                self._changes.store(hashes, level)
                continue
            self._changes.store([each for each in hashes if each not in before], level)
            self._changes.move([each for each in hashes if each in before], level)

    def pop(self, max_hashes: int = MAX_HASHES) -> KvMessage | None:
        """Return the next message; None when the listener knows everything."""
        if self._changes.is_empty and not self._announced:
            return None
        self._sequence += 1
        delta = self._changes.pop(max_hashes)
        self._announced = not self._changes.is_empty
        return KvMessage(self._sequence, delta, more=self._announced)


class KvFeeds:
    """The set of a worker's cached pages, and the feeds that tell of it."""

    def __init__(self) -> None:
        self._cached: dict[int, int] = {}  # level of each page, in order: a page comes after its prefix
        self._feeds: set[KvFeed] = set()

    def open(self) -> KvFeed:
        feed = KvFeed(self._cached)
        self._feeds.add(feed)
        return feed

    def close(self, feed: KvFeed) -> None:
        self._feeds.discard(feed)

    def start_again(self, feed: KvFeed) -> None:
        feed.start_again(self._cached)

    def add(self, delta: CacheDelta) -> None:
        if delta.cleared:
            self._cached.clear()
        told = itertools.chain(delta.removed, *(hashes for _, hashes in delta.placed()))
        before = {each: self._cached[each] for each in told if each in self._cached}
        for page_hash in delta.removed:
            self._cached.pop(page_hash, None)  # not there only if two pages have one hash
        for level, hashes in delta.placed():
            self._cached.update(dict.fromkeys(hashes, level))
        for feed in self._feeds:
            feed.add(delta, before)
