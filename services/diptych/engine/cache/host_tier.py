"""The second level of the prefix cache: slots of host memory for pages that the KV pool has no room for.

Bookkeeping only. The radix tree decides which pages go there and come back; `PageCopier` moves their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from diptych.common.arrays import I32
from diptych.kvtransfer.ownership import Pages

Slots = I32  # indices of the host tier, a page of KV each


class PageCopier(Protocol):
    """Copies pages between the KV pool and the host tier, in order with everything else that touches the pool.

    Copies are made in the order of the lists; a slot may be listed twice, and then the last page stays.
    On return a later forward pass or a later remote write to the pages can't overtake the copy. On a CPU that means
    that it is done; on a GPU it may only be queued on the stream that computes.
    """

    def save(self, pages: Pages, slots: Slots) -> None: ...

    def restore(self, slots: Slots, pages: Pages) -> None: ...


class SlotPool:
    """Which slots are free. Runs of neighbours stay runs, so that copies merge."""

    def __init__(self, capacity: int) -> None:
        self._free: Slots = np.arange(capacity - 1, -1, -1, dtype=np.int32)  # a stack: its first num_free entries
        self.num_free = capacity

    @property
    def capacity(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> Slots:
        """Return `count` slots. There must be so many."""
        assert 0 <= count <= self.num_free, (count, self.num_free)
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count][::-1].copy()

    def release(self, slots: Slots) -> None:
        self._free[self.num_free : self.num_free + len(slots)] = slots[::-1]
        self.num_free += len(slots)

    def free_slots(self) -> Slots:
        return self._free[: self.num_free]


@dataclass(frozen=True, slots=True)
class HostTier:
    """How many pages fit, and how they get there."""

    num_slots: int
    copier: PageCopier


class _NoCopier:
    def save(self, pages: Pages, slots: Slots) -> None:
        raise AssertionError("there is no host tier")

    def restore(self, slots: Slots, pages: Pages) -> None:
        raise AssertionError("there is no host tier")


NO_HOST_TIER: Final = HostTier(0, _NoCopier())
