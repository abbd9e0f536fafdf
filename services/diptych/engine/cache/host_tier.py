"""The tier of host memory: slots for pages that the KV pool has no room for.

Bookkeeping only; `PageCopier` moves the bytes, at once.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from diptych.common.arrays import I32, I64, U64
from diptych.engine.cache.tier import SlotPool, Slots
from diptych.kvtransfer.ownership import Pages


class PageCopier(Protocol):
    """Copies pages between the KV pool and the host tier, in order with everything else that touches the pool.

    Copies are made in the order of the lists; a slot may be listed twice, and then the last page stays.
    On return a later forward pass or a later remote write to the pages can't overtake the copy. On a CPU that means
    that it is done; on a GPU it may only be queued on the stream that computes.
    """

    def save(self, pages: Pages, slots: Slots) -> None: ...

    def restore(self, slots: Slots, pages: Pages) -> None: ...


class HostTier(SlotPool):
    """Implements `Tier`. The level above it is the KV pool, and nobody else fills it."""

    is_shared: Final = False

    def __init__(self, num_slots: int, copier: PageCopier) -> None:
        super().__init__(num_slots)
        self._copier = copier

    def find(self, names: U64, tokens: I64) -> Slots:
        return np.zeros(0, np.int32)  # the tree knows all that is here

    def save(self, places: I32, slots: Slots, names: U64, tokens: I64) -> None:
        self._copier.save(places, slots)

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        self._copier.restore(slots, pages)
        return True


class _NoCopier:
    def save(self, pages: Pages, slots: Slots) -> None:
        raise AssertionError("there is no host tier")

    def restore(self, slots: Slots, pages: Pages) -> None:
        raise AssertionError("there is no host tier")


NO_COPIER: Final = _NoCopier()
