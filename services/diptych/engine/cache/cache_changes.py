"""Collects how a set of cached page hashes has changed since a listener was last told.

Net changes: a page that came and went in between is in neither list, so the lists have no order between them, and they
stay bounded by the size of the cache even when nobody listens. Removals are told first and deep ends first, additions
parents first: after every part of the news the listener's copy holds whole prefixes only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple


class CacheDelta(NamedTuple):
    """What to do to a copy of the set, in this order."""

    cleared: bool = False  # forget everything
    removed: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.cleared or bool(self.removed or self.stored)


class CacheChanges:
    """What a listener's copy of the pages of a radix tree still lacks."""

    def __init__(self) -> None:
        self._cleared = False
        self._stored: dict[int, None] = {}  # dicts, for their order
        self._removed: dict[int, None] = {}

    @property
    def is_empty(self) -> bool:
        return not (self._cleared or self._stored or self._removed)

    def store(self, hashes: Sequence[int]) -> None:
        _move(hashes, self._removed, self._stored)

    def remove(self, hashes: Sequence[int]) -> None:
        _move(hashes, self._stored, self._removed)

    def clear(self) -> None:
        """The set is empty, whatever the listener has."""
        self._cleared = True
        self._stored.clear()
        self._removed.clear()

    def pop(self, max_hashes: int | None = None) -> CacheDelta:
        """Return the next part of the news, of at most `max_hashes`, and count it as told."""
        removed = _pop(self._removed, max_hashes)
        stored = _pop(self._stored, None if max_hashes is None else max_hashes - len(removed))
        delta = CacheDelta(self._cleared, removed, stored)
        self._cleared = False
        return delta


class NoChanges(CacheChanges):
    """Those of a cache that nobody listens to."""

    def store(self, hashes: Sequence[int]) -> None:
        pass

    def remove(self, hashes: Sequence[int]) -> None:
        pass

    def clear(self) -> None:
        pass


NO_CHANGES: Final = NoChanges()


def _move(hashes: Sequence[int], undone: dict[int, None], done: dict[int, None]) -> None:
    if not undone or undone.keys().isdisjoint(hashes):  # which is quickly told, and nearly always so
        done.update(dict.fromkeys(hashes))
        return
    for page_hash in hashes:
        if page_hash in undone:
            del undone[page_hash]
        else:
            done[page_hash] = None


def _pop(hashes: dict[int, None], limit: int | None) -> tuple[int, ...]:
    popped = tuple(itertools.islice(hashes, limit))
    if len(popped) == len(hashes):
        hashes.clear()
    else:
        for page_hash in popped:
            del hashes[page_hash]
    return popped
