"""What keeps pages for longer than a process lives, as a tier of the prefix cache needs it.

Each method returns without waiting for the medium. Pages are known by their ids, which say what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from diptych.common.arrays import I32
from diptych.engine.cache.page_ids import PageId
from diptych.engine.tiers.page_reader import ReadCounts
from diptych.engine.tiers.page_writer import WriteCounts
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages


class MediumCounts(NamedTuple):
    """What a medium has, and has done since start."""

    num_pages: int  # that are known to be there
    nbytes: int  # of these
    written: WriteCounts
    read: ReadCounts
    num_opened: int  # times that it was not asked for a while


class Medium(Protocol):
    """Keeps pages. `close` it before the memory goes that it reads and writes."""

    @property
    def capacity(self) -> int:
        """Pages that it keeps at most, about."""
        ...

    @property
    def num_pages(self) -> int: ...

    @property
    def counts(self) -> MediumCounts: ...

    @property
    def is_asked(self) -> bool:
        """Whether it is asked now: it has not failed of late, and somebody is there to read."""
        ...

    def has(self, page_id: PageId) -> bool:
        """Whether a page is there, as far as that is known."""
        ...

    def lose(self, page_id: PageId) -> None:
        """Let a page be found no more: it is not there, or not what it should be."""
        ...

    def load_s(self, num_pages: int) -> float:
        """Predict how long it takes to load so many pages, with what waits; infinity: not known, or not now."""
        ...

    def keep(self, places: I32, ids: Sequence[PageId]) -> list[bool]:
        """Copy the pages at `places` of the level above, to be written; return which are there, or will be."""
        ...

    def finish_copies(self) -> None:
        """Return when what was to be kept is copied: then peers may write where it was. Steps keep their order."""
        ...

    def forget(self, ids: Sequence[PageId]) -> None:
        """Let nobody find these pages any more, nor in a later life."""
        ...

    def load(self, number: int, ids: Sequence[PageId], pages: Pages) -> None:
        """Bring pages into the pool; `restored` says when, by this number."""
        ...

    def restored(self) -> Sequence[PagesRestored]:
        """Return which loads have ended since the last call, and how; give up what takes too long."""
        ...

    def descriptors(self) -> Sequence[int]:
        """Return what becomes readable when a load has ended."""
        ...

    def close(self) -> None:
        """Write what waits, and return when the pool is written no more."""
        ...

    def finish_writes(self) -> None:
        """Return when all that was kept is written or lost. For tests and benchmarks: this waits for the medium."""
        ...
