"""The tier of local files: pages that survive the process, below the KV pool or host memory.

A slot is a name for a page; where its bytes are, the log knows. A page that is in the log already is not written again
unless it would go with the next segments. What the log has lost meanwhile is found out when a prompt matches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from diptych.common.arrays import I32, U64
from diptych.engine.cache.page_ids import PageId
from diptych.engine.cache.tier import SlotPool, Slots
from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.doorkeeper import Doorkeeper
from diptych.engine.tiers.page_reader import RUN_NBYTES, RUN_PAGES, PageReader, ReadCounts, Run
from diptych.engine.tiers.page_writer import PageWriter, WriteCounts
from diptych.engine.tiers.segment_log import SegmentLog
from diptych.engine.tiers.segments import SegmentFormat
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages

MOST_NAMES: Final = 2**20  # of pages that were turned away, which are remembered


class FileTierCounts(NamedTuple):
    """What a file tier has, and has done since start."""

    num_pages: int  # in the log
    nbytes: int  # of the log's files
    written: WriteCounts
    read: ReadCounts
    num_opened: int  # times that it was not asked for a while


class FileTier(SlotPool):
    """Implements `Tier`. `close` it before the memory goes that it reads and writes."""

    is_shared = True

    def __init__(
        self,
        folder: Path,
        record: SegmentFormat,
        capacity_nbytes: int,
        above: Any,
        pool: Any,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`above`, `pool`: bytes `[number, page_nbytes]` of the level above and of the pool. Raises `ConfigError`."""
        super().__init__(max(1, capacity_nbytes // record.record_nbytes))
        disk = disk or Disk()
        self._above = above
        self._doorkeeper = Doorkeeper(min(MOST_NAMES, 2 * self.capacity))
        self._log = SegmentLog(folder, record, capacity_nbytes, disk)
        self._reader = PageReader(self._log, disk, pool, clock)
        self._writer = PageWriter(self._log, clock, self._reader.measure)
        self._ids: list[PageId | None] = [None] * self.capacity  # of what is in each slot
        self._reader.measure()

    @property
    def counts(self) -> FileTierCounts:
        index, num_opened = self._log.index, self._reader.breaker.num_opened + self._writer.breaker.num_opened
        return FileTierCounts(index.num_pages, index.nbytes, self._writer.counts, self._reader.counts, num_opened)

    @property
    def num_pages(self) -> int:
        return self._log.index.num_pages

    @property
    def gives_pages(self) -> bool:
        return self.num_pages > 0 and self._reader.is_asked

    def admits(self, names: U64, num_uses: int, num_tokens: int) -> bool:
        return self._doorkeeper.admits(names, num_uses, num_tokens)

    def has(self, page_id: PageId) -> bool:
        return self._log.index.find(page_id.key) is not None and self._reader.is_asked

    def claim(self, ids: Sequence[PageId]) -> Slots:
        slots = self.allocate(len(ids))
        for slot, page_id in zip(slots.tolist(), ids, strict=True):
            self._ids[slot] = page_id
        return slots

    def forget(self, ids: Sequence[PageId]) -> None:
        self._writer.forget(ids)

    def num_kept(self, slots: Slots) -> int:
        for number, slot in enumerate(slots.tolist()):
            page_id = self._ids[slot]
            if page_id is None or self._log.index.find(page_id.key) is None:
                return number
        return len(slots)

    def load_s(self, num_places: int) -> float:
        return self._reader.load_s(num_places)

    def save(self, places: I32, slots: Slots, ids: Sequence[PageId]) -> None:
        for place, slot, page_id in zip(places.tolist(), slots.tolist(), ids, strict=True):
            at = self._log.index.find(page_id.key)
            is_kept = at is not None and not self._log.index.is_old(at)
            if is_kept or self._writer.is_pending(page_id.key) or self._writer.give(page_id, self._above[place]):
                self._ids[slot] = page_id
            else:
                self._ids[slot] = page_id if at is not None else None
        self._writer.submit()

    def finish_saves(self) -> None:
        """All is copied on return of `save`."""

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        runs, is_whole = self._runs(slots, pages)
        self._reader.load(number, runs, is_whole)
        return False

    def restored(self) -> Sequence[PagesRestored]:
        """Return which restores have ended since the last call, and how."""
        return self._reader.restored()

    def descriptors(self) -> Sequence[int]:
        """Return what becomes readable when a restore has ended."""
        return (self._reader.fileno(),)

    def close(self) -> None:
        """Write what waits, and return when the pool is written no more."""
        self._writer.close()
        self._reader.close()

    def finish_writes(self) -> None:
        """Return when all that was saved is written or lost. For tests and benchmarks: this waits for the medium."""
        self._writer.finish()

    def _runs(self, slots: Slots, pages: Pages) -> tuple[list[Run], bool]:
        """Return what to read, and whether that is all."""
        runs: list[Run] = []
        size = self._log.record.record_nbytes
        longest = max(1, min(RUN_PAGES, RUN_NBYTES // size))
        for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
            page_id = self._ids[slot]
            at = None if page_id is None else self._log.find(page_id.key)
            if page_id is None or at is None:
                return runs, False
            path, offset = at
            last = runs[-1] if runs else None
            follows = last is not None and last.path == path and last.offset + len(last.ids) * size == offset
            if last is None or not follows or len(last.ids) == longest:
                last = Run(path, offset, [], [])
                runs.append(last)
            last.ids.append(page_id)
            last.pages.append(page)
        return runs, True
