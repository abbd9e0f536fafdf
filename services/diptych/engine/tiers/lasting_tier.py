"""A tier over a medium that outlives the process: the books of its slots.

A slot is a name for a page; where its bytes are, the medium knows. What that has lost meanwhile is found out when a
prompt matches it.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.common.arrays import I32
from diptych.engine.cache.page_ids import NOBODYS, PageId
from diptych.engine.cache.tier import SlotPool, Slots
from diptych.engine.tiers.medium import Medium, MediumCounts
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages


class LastingTier(SlotPool):
    """Implements most of `Tier`. `close` it before the memory goes that the medium reads and writes."""

    is_shared = True

    def __init__(self, medium: Medium) -> None:
        super().__init__(medium.capacity)
        self._medium = medium
        self._ids: list[PageId | None] = [None] * self.capacity  # of what is in each slot

    @property
    def counts(self) -> MediumCounts:
        return self._medium.counts

    @property
    def num_pages(self) -> int:
        return self._medium.num_pages

    @property
    def gives_pages(self) -> bool:
        return self.num_pages > 0 and self._medium.is_asked

    def has(self, page_id: PageId) -> bool:
        return self._medium.has(page_id) and self._medium.is_asked

    def claim(self, ids: Sequence[PageId]) -> Slots:
        slots = self.allocate(len(ids))
        for slot, page_id in zip(slots.tolist(), ids, strict=True):
            self._ids[slot] = page_id
        return slots

    def forget(self, ids: Sequence[PageId]) -> None:
        self._medium.forget(ids)

    def num_kept(self, slots: Slots) -> int:
        for number, slot in enumerate(slots.tolist()):
            page_id = self._ids[slot]
            if page_id is None or not self._medium.has(page_id):
                return number
        return len(slots)

    def load_s(self, num_places: int) -> float:
        return self._medium.load_s(num_places)

    def restore_s(self, num_places: int) -> float:
        return self._medium.load_s(num_places)

    def save(self, places: I32, slots: Slots, ids: Sequence[PageId]) -> None:
        kept = self._medium.keep(places, ids)
        for slot, page_id, is_kept in zip(slots.tolist(), ids, kept, strict=True):
            self._ids[slot] = page_id if is_kept else None

    def finish_saves(self) -> None:
        self._medium.finish_copies()

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        ids = [self._ids[slot] or NOBODYS for slot in slots.tolist()]  # of which the medium has none
        self._medium.load(number, ids, pages)
        return False

    def restored(self) -> Sequence[PagesRestored]:
        """Return which restores have ended since the last call, and how."""
        return self._medium.restored()

    def descriptors(self) -> Sequence[int]:
        """Return what becomes readable when a restore has ended."""
        return self._medium.descriptors()

    def close(self) -> None:
        """Write what waits, and return when the pool is written no more."""
        self._medium.close()

    def finish_writes(self) -> None:
        """Return when all that was saved is written or lost. For tests and benchmarks: this waits for the medium."""
        self._medium.finish_writes()
