"""Keeps a directory that is a store within its bytes: what was written first goes first.

A bucket has rules of its own for that, which whoever runs it sets. Every worker that writes to a directory does this,
so that no one of them has to be there. Each looks again when it has written a part of what may be there, or more than a
little and has not looked for a while: others have written meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from diptych.engine.tiers.stores.object_store import Entry, ListedStore

PART: Final = 1 / 16  # of the capacity: so much one writes before it looks again, at most
NUM_WRITES: Final = 4  # after as many it looks again, too
LOOK_S: Final = 2.0  # but not sooner than that: to list what is there takes a while
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

    def __init__(self, store: ListedStore, capacity_nbytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._capacity_nbytes = capacity_nbytes
        self._clock = clock
        self._looked_s = -math.inf
        self._written: float = math.inf  # bytes since it was looked at; infinity: it never was
        self._has_written = False

    def make(self, nbytes: int) -> None:
        """See to it that there is room for so many bytes, which are written then. Raises `OSError`."""
        coming = max(int(PART * self._capacity_nbytes), nbytes)
        is_late = self._clock() >= self._looked_s + LOOK_S
        if self._written + nbytes > (min(coming, NUM_WRITES * nbytes) if is_late else coming):
            entries = self._entries()
            self._delete(surplus(entries, self._capacity_nbytes, coming))
        self._written += nbytes
        self._has_written = True

    def make_at_once(self, nbytes: int) -> None:
        """The medium is full: all that it takes is what is there now. Raises `OSError`."""
        entries = self._entries()
        held_nbytes = sum(entry.nbytes for entry in entries)
        self._delete(surplus(entries, min(held_nbytes, self._capacity_nbytes), nbytes))

    def _entries(self) -> Sequence[Entry]:
        entries = [*self._store.entries()]
        if self._has_written and not entries:
            raise OSError("nothing is listed of what was written: its size is not known")
        return entries

    def _delete(self, names: Sequence[str]) -> None:
        self._store.delete(names)
        self._written, self._looked_s = 0, self._clock()
