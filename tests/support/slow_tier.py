"""A tier of the prefix cache that takes its time: what it is asked for comes back when the test lets it.

It stands for files, objects and peers. Others may have filled it: what one cache has saved, another one finds by name.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from diptych.common.arrays import I32, I64, U64
from diptych.engine.cache.tier import SlotPool, Slots
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages

Stored = dict[int, tuple[bytes, U64]]  # by name: the page's tokens and its KV


class SlowTier(SlotPool):
    """Implements `Tier` over `pool`, the KV pool, with pages of the level `above`, which may be the pool too."""

    def __init__(self, num_slots: int, pool: U64, above: U64 | None = None, stored: Stored | None = None) -> None:
        """`stored` is what others have saved, and will save."""
        super().__init__(num_slots)
        self.is_shared = stored is not None
        self.memory = np.zeros((num_slots, pool.shape[1]), np.uint64)
        self.num_asked = 0  # restores, since start
        self._pool = pool
        self._above = pool if above is None else above
        self._stored: Stored = {} if stored is None else stored
        self._names = np.zeros(num_slots, np.uint64)  # of what is in each slot
        self._asked: deque[tuple[int, Slots, Pages]] = deque()

    def find(self, names: U64, tokens: I64) -> Slots:
        found: list[U64] = []
        for name, page in zip(names.tolist(), _pages(tokens, self._pool.shape[1]), strict=True):
            stored = self._stored.get(name)
            if stored is None or stored[0] != page or len(found) == self.num_free:
                break
            found.append(stored[1])
        slots = self.allocate(len(found))
        self._names[slots] = names[: len(found)]
        for slot, kv in zip(slots.tolist(), found, strict=True):
            self.memory[slot] = kv
        return slots

    def save(self, places: I32, slots: Slots, names: U64, tokens: I64) -> None:
        for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
            self.memory[slot] = self._above[place]
        pages = _pages(tokens, self._pool.shape[1])
        for name, page, slot in zip(names.tolist(), pages, slots.tolist(), strict=True):
            self._names[slot] = name
            self._stored[name] = page, self.memory[slot].copy()

    def finish_saves(self) -> None:
        """All is read on return of `save`."""

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        self.num_asked += 1
        self._asked.append((number, slots, pages))
        self._pool[pages] = 0  # nobody may read them yet
        return False

    @property
    def is_asked(self) -> bool:
        """Whether a restore is not answered yet."""
        return bool(self._asked)

    def answer(self, error: str | None = None) -> PagesRestored:
        """End the oldest restore."""
        number, slots, pages = self._asked.popleft()
        if error is None:
            self._pool[pages] = self.memory[slots]
        else:
            for name in self._names[slots].tolist():
                self._stored.pop(name, None)
        return PagesRestored(number, error)


def _pages(tokens: I64, page_size: int) -> list[bytes]:
    """Return the tokens of each whole page."""
    return [tokens[start : start + page_size].tobytes() for start in range(0, len(tokens) - page_size + 1, page_size)]
