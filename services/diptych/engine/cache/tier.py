"""What a level of the prefix cache below the KV pool must offer, and the books of its slots. Pure.

The pool is level 0, and the tiers are the levels 1, 2, ... in the order in which evicted pages go down. The radix tree
decides which pages go where. A tier keeps their bytes in numbered slots, and takes its pages from the level above it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from diptych.common.arrays import I32, I64, U64
from diptych.kvtransfer.ownership import Pages

POOL: Final = 0  # the level of the KV pool

Slots = I32  # indices of a tier, a page of KV each


class Books(Protocol):
    """What the radix tree needs of a tier: which of its slots are free."""

    @property
    def capacity(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    def allocate(self, count: int) -> Slots:
        """Return `count` slots. There must be so many."""
        ...

    def release(self, slots: Slots) -> None:
        """Drop what is in the slots. Their bytes stay until they are saved to again: a tier below may read them."""
        ...

    def free_slots(self) -> Slots: ...


class Tier(Books, Protocol):
    """One level of the prefix cache, with its bytes."""

    @property
    def is_shared(self) -> bool:
        """Whether others fill it too: then `find` is asked for what the tree does not know."""
        ...

    def find(self, names: U64, tokens: I64) -> Slots:
        """Return the slots of the leading pages of these names that the tier has, without waiting.

        The slots are the tree's from then on, as if it had allocated them. A name is no proof: compare the tokens.
        """
        ...

    def save(self, places: I32, slots: Slots, names: U64, tokens: I64) -> None:
        """Keep evicted pages, which lie at `places` of the level above; on return later steps may write these again.

        `names` and `tokens` are those of the pages, for tiers in which others look for them.
        Pages are kept in the order of the lists; a slot may be listed twice, and then the last page stays.
        """
        ...

    def finish_saves(self) -> None:
        """Return when all that was to be saved is read: then peers may write into the pages, too.

        Whatever a step or a restore writes keeps its order with `save` by itself.
        """
        ...

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        """Bring pages back into the KV pool. True: no later forward pass or remote write overtakes that.

        False: not yet. Then the tier answers by one `PagesRestored` of this number, and writes into the pages no more.
        What can't be restored is not found again.
        """
        ...


@dataclass(slots=True, eq=False)
class Restore:
    """Pages on their way back from a tier that takes its time. A `Reason` to wait for requests that share them."""

    number: int
    level: int  # of the tier
    slots: Slots  # which stay taken until it has ended
    pages: Pages  # of the pool, which the tier writes
    has_ended: bool = False
    until_s: float = math.inf

    def is_over(self, now_s: float) -> bool:
        return self.has_ended


class SlotPool:
    """Implements `Books`. Runs of neighbours stay runs, so that copies merge."""

    def __init__(self, capacity: int) -> None:
        self._free: Slots = np.arange(capacity - 1, -1, -1, dtype=np.int32)  # a stack: its first num_free entries
        self.num_free = capacity

    @property
    def capacity(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> Slots:
        assert 0 <= count <= self.num_free, (count, self.num_free)
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count][::-1].copy()

    def release(self, slots: Slots) -> None:
        self._free[self.num_free : self.num_free + len(slots)] = slots[::-1]
        self.num_free += len(slots)

    def free_slots(self) -> Slots:
        return self._free[: self.num_free]
