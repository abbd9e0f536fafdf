"""Collects how a set of cached page hashes, and where each of them lies, has changed since a listener was last told.

Net changes: a page that came and went in between is in no list, so the lists have no order between them, and they
stay bounded by the size of the cache even when nobody listens. Removals are told first and deep ends first, additions
parents first: after every part of the news the listener's copy holds whole prefixes only.

Each page has a level: that of the KV pool, or of a tier below it. A page that has moved is told as one that is stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from diptych.engine.cache.tier import POOL

Levels = tuple[tuple[int, tuple[int, ...]], ...]  # levels of tiers, and hashes of pages there
ELSEWHERE: Final = -1  # no level of the page now


@dataclass(frozen=True, slots=True)
class CacheDelta:
    """What to do to a copy of the set, in this order."""

    cleared: bool = False  # forget everything
    removed: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()  # are in the pool now
    below: Levels = ()  # are in a tier now

    def __bool__(self) -> bool:
        return self.cleared or bool(self.removed or self.stored or self.below)

    def placed(self) -> Iterable[tuple[int, tuple[int, ...]]]:
        """Return the pages that are stored, by level."""
        return ((POOL, self.stored), *self.below)


class CacheChanges:
    """What a listener's copy of the pages of a radix tree still lacks."""

    def __init__(self) -> None:
        self._cleared = False
        self._stored: dict[int, int] = {}  # level of what the listener lacks; dicts, for their order
        self._moved: dict[int, int] = {}  # new level of what it has elsewhere
        self._removed: dict[int, int] = {}  # level in which the listener has it, or `ELSEWHERE`

    @property
    def is_empty(self) -> bool:
        return not (self._cleared or self._stored or self._moved or self._removed)

    def store(self, hashes: Iterable[int], level: int = POOL) -> None:
        """Pages have come that were nowhere."""
        new = tuple(hashes)
        if self._removed.keys().isdisjoint(new):  # which is quickly told, and nearly always so
            self._stored.update(dict.fromkeys(new, level))
            return
        for page_hash in new:
            before = self._removed.pop(page_hash, None)
            if before is None:
                self._stored[page_hash] = level
            elif before != level:
                self._moved[page_hash] = level

    def move(self, hashes: Iterable[int], level: int) -> None:
        """Pages that are cached lie in another level now."""
        for page_hash in hashes:
            (self._stored if page_hash in self._stored else self._moved)[page_hash] = level

    def remove(self, hashes: Iterable[int], level: int = POOL) -> None:
        """Pages have gone from a level."""
        gone = tuple(hashes)
        if self._stored.keys().isdisjoint(gone) and self._moved.keys().isdisjoint(gone):
            self._removed.update(dict.fromkeys(gone, level))
            return
        for page_hash in gone:
            if self._stored.pop(page_hash, None) is None:
                self._removed[page_hash] = level if self._moved.pop(page_hash, None) is None else ELSEWHERE

    def clear(self) -> None:
        """The set is empty, whatever the listener has."""
        self._cleared = True
        self._stored.clear()
        self._moved.clear()
        self._removed.clear()

    def pop(self, max_hashes: int | None = None) -> CacheDelta:
        """Return the next part of the news, of at most `max_hashes`, and count it as told."""
        removed = tuple(_pop(self._removed, max_hashes))
        left = None if max_hashes is None else max_hashes - len(removed)
        placed = _pop(self._stored, left)
        placed |= _pop(self._moved, None if left is None else left - len(placed))
        stored, below = _by_level(placed)
        delta = CacheDelta(self._cleared, removed, stored, below)
        self._cleared = False
        return delta


class NoChanges(CacheChanges):
    """Those of a cache that nobody listens to."""

    def store(self, hashes: Iterable[int], level: int = POOL) -> None:
        pass

    def move(self, hashes: Iterable[int], level: int) -> None:
        pass

    def remove(self, hashes: Iterable[int], level: int = POOL) -> None:
        pass

    def clear(self) -> None:
        pass


NO_CHANGES: Final = NoChanges()


def _by_level(placed: Mapping[int, int]) -> tuple[tuple[int, ...], Levels]:
    """Return the pages of the pool, and those of each tier, in their order."""
    if not any(placed.values()):
        return tuple(placed), ()
    levels: dict[int, list[int]] = {}
    for page_hash, level in placed.items():
        levels.setdefault(level, []).append(page_hash)
    return tuple(levels.pop(POOL, ())), tuple([(level, tuple(hashes)) for level, hashes in levels.items()])


def _pop(hashes: dict[int, Any], limit: int | None) -> dict[int, Any]:
    popped = hashes.copy() if limit is None else dict(itertools.islice(hashes.items(), limit))
    if len(popped) == len(hashes):
        hashes.clear()
    else:
        for page_hash in popped:
            del hashes[page_hash]
    return popped
