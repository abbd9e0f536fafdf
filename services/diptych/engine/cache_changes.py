"""Collects how the set of cached page hashes has changed since it was last reported.

Net changes: a page that came and went in between is in neither list, so the lists have no order between them, and they
stay bounded by the size of the cache even when nobody listens.
"""

from __future__ import annotations

from diptych.engine.batch import U64


class CacheChanges:
    """What to add to, and what to take from, a listener's copy of the set."""

    def __init__(self) -> None:
        self._stored: dict[int, None] = {}  # dicts, for their order
        self._removed: dict[int, None] = {}

    def store(self, hashes: U64) -> None:
        for page_hash in hashes.tolist():
            _move(page_hash, self._removed, self._stored)

    def remove(self, hashes: U64) -> None:
        for page_hash in hashes.tolist():
            _move(page_hash, self._stored, self._removed)

    def drain(self) -> tuple[list[int], list[int]]:
        """Return (stored, removed) and start anew."""
        drained = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return drained


def _move(page_hash: int, undone: dict[int, None], done: dict[int, None]) -> None:
    if page_hash in undone:
        del undone[page_hash]
    else:
        done[page_hash] = None
