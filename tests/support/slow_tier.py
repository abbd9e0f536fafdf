"""A tier of the prefix cache that takes its time: what it is asked for comes back when the test lets it.

It stands for files, objects and peers. Others may have filled it: what one cache has saved, another one finds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from diptych.common.arrays import I32, U64
from diptych.engine.cache.page_ids import PageId
from diptych.engine.cache.tier import SlotPool, Slots
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages

Stored = dict[bytes, U64]  # the KV of pages, by their keys


class SlowTier(SlotPool):
    """Implements `Tier` over `pool`, the KV pool, with pages of the level `above`, which may be the pool too."""

    def __init__(self, num_slots: int, pool: U64, above: U64 | None = None, stored: Stored | None = None) -> None:
        """`stored` is what others have saved, and will save."""
        super().__init__(num_slots)
        self.is_shared = stored is not None
        self.memory = np.zeros((num_slots, pool.shape[1]), np.uint64)
        self.num_asked = 0  # restores, since start
        self.takes_s = 0.0  # that it says a restore takes
        self.fewest_uses = 0  # of a text that it takes
        self.lost: set[int] = set()  # slots that have nothing any more
        self._pool = pool
        self._above = pool if above is None else above
        self._stored: Stored = {} if stored is None else stored
        self._keys: list[bytes] = [b""] * num_slots  # of what is in each slot
        self._asked: deque[tuple[int, Slots, Pages]] = deque()

    def admits(self, names: U64, num_uses: int, num_tokens: int) -> bool:
        return num_uses >= self.fewest_uses

    def has(self, page_id: PageId) -> bool:
        return page_id.key in self._stored

    def claim(self, ids: Sequence[PageId]) -> Slots:
        slots = self.allocate(len(ids))
        self._keep(slots, ids, np.array([self._stored[page_id.key] for page_id in ids]))
        return slots

    def forget(self, ids: Sequence[PageId]) -> None:
        for page_id in ids:
            self._stored.pop(page_id.key, None)

    def num_kept(self, slots: Slots) -> int:
        return next((number for number, slot in enumerate(slots.tolist()) if slot in self.lost), len(slots))

    def load_s(self, num_places: int) -> float:
        return self.takes_s

    def restore_s(self, num_places: int) -> float:
        return self.takes_s

    def save(self, places: I32, slots: Slots, ids: Sequence[PageId]) -> None:
        self._keep(slots, ids, self._above[places])
        for page_id, place in zip(ids, places.tolist(), strict=True) if self.is_shared else ():
            self._stored[page_id.key] = self._above[place].copy()

    def _keep(self, slots: Slots, ids: Sequence[PageId], kv: U64) -> None:
        for number, slot in enumerate(slots.tolist()):
            self.memory[slot] = kv[number]
            self._keys[slot] = ids[number].key if ids else b""
            self.lost.discard(slot)

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
            for slot in slots.tolist():
                self._stored.pop(self._keys[slot], None)
        return PagesRestored(number, error)
