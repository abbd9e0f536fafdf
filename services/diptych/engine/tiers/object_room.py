"""Keeps a directory that is a store within its bytes: what was written first goes first.

A bucket has rules of its own for that, which whoever runs it sets. Every worker that writes to a directory does this,
so that no one of them has to be there; each looks again when it has written a part of what may be there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from diptych.engine.tiers.object_store import Entry, ObjectStore

PART: Final = 1 / 16  # of the capacity: so much one writes before it looks again
LEFT: Final = 7 / 8  # of the capacity: so much is left when something has to go


def surplus(entries: Sequence[Entry], capacity_nbytes: int, coming_nbytes: int) -> list[str]:
    """Return what has to go before so many bytes come, the oldest first."""
    over = sum(entry.nbytes for entry in entries) + coming_nbytes - capacity_nbytes
    if over <= 0:
        return []
    over += int((1 - LEFT) * capacity_nbytes)
    gone = []
    for entry in sorted(entries, key=lambda entry: entry.written_s):
        if over <= 0:
            break
        over -= entry.nbytes
        gone.append(entry.name)
    return gone


class Room:
    """One thread asks for it."""

    def __init__(self, store: ObjectStore, capacity_nbytes: int) -> None:
        self._store = store
        self._capacity_nbytes = capacity_nbytes
        self._written: float = math.inf  # bytes since it was looked at; infinity: it never was
        self._has_written = False

    def make(self, nbytes: int) -> None:
        """See to it that there is room for so many bytes, which are written then. Raises `OSError`."""
        coming = max(int(PART * self._capacity_nbytes), nbytes)
        if self._written + nbytes > coming:
            entries = [*self._store.entries()]
            if self._has_written and not entries:
                raise OSError("nothing is listed of what was written: its size is not known")
            self._store.delete(surplus(entries, self._capacity_nbytes, coming))
            self._written = 0
        self._written += nbytes
        self._has_written = True
