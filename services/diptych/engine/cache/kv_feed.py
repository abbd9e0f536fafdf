"""What listeners are told of a worker's cached pages: each a snapshot first, then changes, in numbered messages.

A listener that has applied every message up to one without `more` has exactly the worker's set. One that misses a
number can't know what it lacks; it asks to start again, which costs the worker's scheduler nothing.
A slow listener gets fewer and larger messages, and what waits for it is bounded by the size of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from diptych.engine.cache.cache_changes import CacheChanges, CacheDelta

MAX_HASHES: Final = 16384  # a message; 128 KiB


@dataclass(frozen=True, slots=True)
class KvMessage:
    """One message to one listener."""

    sequence: int  # 1, 2, ...
    delta: CacheDelta
    more: bool = False  # the rest of this news follows at once


class KvFeed:
    """One listener's news."""

    def __init__(self, cached: Iterable[int]) -> None:
        self._changes = CacheChanges()
        self._sequence = 0
        self._announced = False  # that more follows
        self.start_again(cached)

    def start_again(self, cached: Iterable[int]) -> None:
        self._changes.clear()
        self._changes.store(tuple(cached))

    def add(self, delta: CacheDelta) -> None:
        if delta.cleared:
            self._changes.clear()
        self._changes.remove(delta.removed)
        self._changes.store(delta.stored)

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
        self._cached: dict[int, None] = {}  # a dict, for its order: a page comes after its prefix
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
        for page_hash in delta.removed:
            self._cached.pop(page_hash, None)  # not there only if two pages have one hash
        self._cached.update(dict.fromkeys(delta.stored))
        for feed in self._feeds:
            feed.add(delta)
