"""A tier of the prefix cache in virtual time: pages come back one load after the other, at the speed of its medium.

A model, of the time that loads take: a page has no bytes, and what is saved is there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diptych.common.arrays import I32
from diptych.engine.cache.page_ids import PageId
from diptych.engine.cache.tier import SlotPool, Slots
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages
from diptych.simulator.clock import Clock
from diptych.simulator.setup import TierSetup


class SimTier(SlotPool):
    """Implements `Tier`. Nobody else fills it."""

    def __init__(self, setup: TierSetup, page_nbytes: int, clock: Clock, tell: Callable[[PagesRestored], None]) -> None:
        """`tell` hears of each load that has ended."""
        super().__init__(setup.num_pages)
        self.name = setup.name
        self._setup = setup
        self._page_nbytes = page_nbytes
        self._clock = clock
        self._tell = tell
        self._busy_until_s = 0.0

    def has(self, page_id: PageId) -> bool:
        return False  # the tree knows all that is here

    def claim(self, ids: Sequence[PageId]) -> Slots:
        raise AssertionError("nobody else fills it")

    def forget(self, ids: Sequence[PageId]) -> None:
        pass

    def num_kept(self, slots: Slots) -> int:
        return len(slots)

    def load_s(self, num_places: int) -> float:
        waits_s = max(0.0, self._busy_until_s - self._clock.now_s)
        return waits_s + self._setup.base_s + num_places * self._page_nbytes / self._setup.bytes_per_s

    def restore_s(self, num_places: int) -> float:
        return self.load_s(num_places)

    def save(self, places: I32, slots: Slots, ids: Sequence[PageId]) -> None:
        pass

    def finish_saves(self) -> None:
        pass

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        self._busy_until_s = self._clock.now_s + self.load_s(len(slots))
        self._clock.at(self._busy_until_s, lambda: self._tell(PagesRestored(number, None)))
        return False
