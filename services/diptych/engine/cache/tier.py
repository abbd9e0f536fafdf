"""What a level of the prefix cache below the KV pool must offer, and the books of its slots. Pure.

The pool is level 0, and the tiers are the levels 1, 2, ... in the order in which evicted pages go down. The radix tree
decides which pages go where. A tier keeps their bytes in numbered slots, and takes its pages from the level above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from diptych.common.arrays import I32, U64
from diptych.engine.cache.page_ids import PageId
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

    @property
    def is_shared(self) -> bool:
        """Whether it has pages that the tree does not know: of others, or of an earlier life."""
        ...

    def admits(self, names: U64, num_uses: int, num_tokens: int) -> bool:
        """Whether pages at the end of a text of so many tokens are worth their places; what is before is taken, too.

        They were used so often since they are cached.
        """
        ...


class Tier(Books, Protocol):
    """One level of the prefix cache, with its bytes."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages that it has: of a shared tier also those that the tree does not know."""
        ...

    @property
    def gives_pages(self) -> bool:
        """Whether a shared tier may have anything now that it could bring back."""
        ...

    def has(self, page_id: PageId) -> bool:
        """Whether a shared tier could bring a page back, as far as it knows without waiting."""
        ...

    def claim(self, ids: Sequence[PageId]) -> Slots:
        """Return slots for pages that a shared tier has, of which so many are free. They are as if allocated."""
        ...

    def forget(self, ids: Sequence[PageId]) -> None:
        """Let nobody find these pages any more, nor in a later life."""
        ...

    def num_kept(self, slots: Slots) -> int:
        """Return how many of the first of these slots still have what was saved: a tier may have lost some."""
        ...

    def load_s(self, num_places: int) -> float:
        """Predict how long a restore of so many places takes, with all that is before it; infinity: it can't now."""
        ...

    def restore_s(self, num_places: int) -> float:
        """Return what routers are told of such a restore: `load_s`, but where that says 0 what was measured."""
        ...

    def came(self, number: int) -> None:
        """The restore of this number, for which `restore` said "not yet", has ended well."""
        ...

    def save(self, places: I32, slots: Slots, ids: Sequence[PageId]) -> None:
        """Keep evicted pages, which lie at `places` of the level above; on return later steps may write these again.

        `ids` are those of the pages, for a shared tier. A tier may fail to keep some, and says so by `num_kept`.
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
    start: int  # pages of the text that are before those of its tokens
    end: int  # and behind these
    saved_s: float = 0.0  # of computing, as predicted when it was begun
    has_ended: bool = False
    has_failed: bool = False
    until_s: float = math.inf

    def is_over(self, now_s: float) -> bool:
        return self.has_ended


@dataclass(slots=True, eq=False)
class Lookup:
    """A store is asked what it has of a text. A `Reason` to wait for requests, but not for long."""

    until_s: float  # by the clock of the tree
    is_answered: bool = False

    def is_over(self, now_s: float) -> bool:
        return self.is_answered or now_s >= self.until_s


class Store(Tier, Protocol):
    """A tier that many workers fill, and that must be asked what it has.

    It keeps pages in *runs*: of a text the first `run_pages`, the next ones, and so on; never a part of a run. Of what
    lies beside them it keeps *ends*: all that is needed to go on behind a run. It takes texts that are in the pool, not
    what is evicted.
    """

    @property
    def run_pages(self) -> int: ...

    @property
    def look_up_s(self) -> float:
        """How long an answer takes, as was measured; infinity: that is not known, or it is not asked now."""
        ...

    def look_up(
        self, first: int, ids: Sequence[PageId], until_s: float, before: Sequence[PageId] = ()
    ) -> Lookup | None:
        """Ask for the pages of a text behind its first ones; None: there is nothing to ask.

        `before`: the pages before them that layers with a window see from there.
        When it is answered, `has` knows.
        """
        ...

    def forget_runs(self, ids: Sequence[PageId], ends: Sequence[PageId]) -> None:
        """Let nobody find these pages any more, as `forget`, of which `ends` are the last ones of runs."""
        ...

    @property
    def takes_pages(self) -> bool:
        """Whether it can be written to now."""
        ...

    def takes(self, names: U64, num_uses: int, num_tokens: int) -> bool:
        """Whether pages at the end of a text are worth their bytes; as `admits`."""
        ...

    def lacks(self, group: int, name: int) -> bool:
        """Whether what ends with the page of this group and name may not be there yet."""
        ...

    def offer(self, pages: Pages, ids: Sequence[PageId]) -> None:
        """Give a run, or an end, that is in these pages of the pool. They are copied on return, or dropped."""
        ...


class SlotPool:
    """Implements `Books` of a tier that takes all. Runs of neighbours stay runs, so that copies merge."""

    is_shared: bool = False
    name: str = "host"

    def __init__(self, capacity: int) -> None:
        self._free: Slots = np.arange(capacity - 1, -1, -1, dtype=np.int32)  # a stack: its first num_free entries
        self.num_free = capacity

    @property
    def capacity(self) -> int:
        return len(self._free)

    @property
    def num_pages(self) -> int:
        return self.capacity - self.num_free

    @property
    def gives_pages(self) -> bool:
        return True

    def allocate(self, count: int) -> Slots:
        assert 0 <= count <= self.num_free, (count, self.num_free)
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count][::-1].copy()

    def release(self, slots: Slots) -> None:
        self._free[self.num_free : self.num_free + len(slots)] = slots[::-1]
        self.num_free += len(slots)

    def free_slots(self) -> Slots:
        return self._free[: self.num_free]

    def came(self, number: int) -> None:
        """Nothing is to be learned."""

    def admits(self, names: U64, num_uses: int, num_tokens: int) -> bool:
        return True
