"""The tier of host memory: slots for pages that the KV pool has no room for.

Bookkeeping only; `PageCopier` moves the bytes, at once or beside the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from diptych.common.arrays import I32
from diptych.engine.cache.page_ids import PageId
from diptych.engine.cache.tier import SlotPool, Slots
from diptych.kvtransfer.ownership import Pages

KEPT: Final = 0.9  # of what is known of restores, when one more is


class PageCopies(Protocol):
    """Copies pages between the KV pool and the host tier, in order with every forward pass.

    Copies are made in the order of the lists; a slot may be listed twice, and then the last page stays. On a CPU a copy
    is done on return; on a GPU it is queued beside the steps.
    """

    def save(self, pages: Pages, slots: Slots) -> None:
        """On return a later forward pass or `restore` can't overtake the copy out of `pages`."""
        ...

    def finish_saves(self) -> None:
        """Return when a later remote write can't overtake it either: what was to be saved has been read."""
        ...

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        """Return whether any later forward pass finds the pages; otherwise that is said later, of this `number`.

        Until then the slots are not saved to, and nobody else touches the pages.
        """
        ...


class PageCopier(PageCopies, Protocol):
    """Makes copies that may take their time, and says when."""

    def restored(self) -> Sequence[int]:
        """Return which restores have ended since the last call, without waiting."""
        ...

    def descriptors(self) -> Sequence[int]:
        """Return what becomes readable when a restore has ended."""
        ...

    def close(self) -> None:
        """Return when no copy is under way. Before the memory of the pool goes."""
        ...


class HostTier(SlotPool):
    """Implements `Tier`. The level above it is the KV pool, and nobody else fills it."""

    def __init__(self, num_slots: int, copier: PageCopies, clock: Callable[[], float] = lambda: 0.0) -> None:
        """`clock` measures copies, for routers; without one they are told as free."""
        super().__init__(num_slots)
        self._copier = copier
        self._clock = clock
        self._pages = self._seconds = 0.0  # of restores, of which the last ones count most
        self._begun: dict[int, tuple[int, float]] = {}  # pages, and since when, of restores that are under way

    def has(self, page_id: PageId) -> bool:
        return False  # the tree knows all that is here

    def claim(self, ids: Sequence[PageId]) -> Slots:
        raise AssertionError("nobody else fills host memory")

    def forget(self, ids: Sequence[PageId]) -> None:
        pass

    def num_kept(self, slots: Slots) -> int:
        return len(slots)

    def load_s(self, num_places: int) -> float:
        return 0.0  # in any case far sooner than computed

    def restore_s(self, num_places: int) -> float:
        return num_places * self._seconds / self._pages if self._pages else 0.0

    def came(self, number: int) -> None:
        self._learn(*self._begun.pop(number))

    def save(self, places: I32, slots: Slots, ids: Sequence[PageId]) -> None:
        self._copier.save(places, slots)

    def finish_saves(self) -> None:
        self._copier.finish_saves()

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        begun = len(slots), self._clock()
        if not self._copier.restore(number, slots, pages):
            self._begun[number] = begun
            return False
        self._learn(*begun)
        return True

    def _learn(self, num_pages: int, begun_s: float) -> None:
        self._pages = KEPT * self._pages + num_pages
        self._seconds = KEPT * self._seconds + self._clock() - begun_s


class _NoCopier:
    def save(self, pages: Pages, slots: Slots) -> None:
        raise AssertionError("there is no host tier")

    def finish_saves(self) -> None:
        pass

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        raise AssertionError("there is no host tier")

    def restored(self) -> Sequence[int]:
        return ()

    def descriptors(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        pass


NO_COPIER: Final = _NoCopier()
