"""Pages in the files of a segment log: given, found by their keys, read back. Implements `Medium`.

A page that is in the log already is not written again unless it would go with the next segments.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, Final

from diptych.common.arrays import I32
from diptych.engine.cache.page_ids import PageId
from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.medium import MediumCounts
from diptych.engine.tiers.page_format import Buffer
from diptych.engine.tiers.page_reader import RUN_PAGES, PageReader
from diptych.engine.tiers.page_writer import PageWriter
from diptych.engine.tiers.records import Run
from diptych.engine.tiers.segment_log import SegmentLog
from diptych.engine.tiers.segments import BLOCK, SegmentFormat
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages

NUM_READERS: Final = 2
RUN_NBYTES: Final = 2**20  # that are read at once, or one page
READ_S: Final = 1.0  # after which a read counts as hanging
MOST_OPEN: Final = 4  # files of a reader, while it is busy
NUM_BUFFERS: Final = 4  # of what waits to be written
BUFFER_NBYTES: Final = 8 * 2**20


class PageFiles:
    """`close` it before the memory goes that it reads and writes."""

    def __init__(
        self,
        folder: Path,
        record: SegmentFormat,
        capacity_nbytes: int,
        above: Any,
        pool: Any,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
        number: int | None = None,
    ) -> None:
        """`above`, `pool`: bytes `[number, page_nbytes]` of the level above and of the pool. Raises `ConfigError`.

        `number`: of the folder below that of the terms; None: the first that is free.
        """
        disk = disk or Disk()
        self.capacity = max(1, capacity_nbytes // record.record_nbytes)
        self.log = SegmentLog(folder, record, capacity_nbytes, disk, number)
        self._above = above
        self.reader = PageReader(
            _Segments(self.log, disk), record, pool, clock, num_readers=NUM_READERS, hangs_s=READ_S
        )
        buffer_nbytes = max(BUFFER_NBYTES, -(-record.record_nbytes // BLOCK) * BLOCK)
        self.writer = PageWriter(
            _Appending(self.log),
            record,
            clock,
            self.reader.measure,
            num_buffers=NUM_BUFFERS,
            buffer_nbytes=buffer_nbytes,
        )
        self.reader.measure()

    @property
    def counts(self) -> MediumCounts:
        index, num_opened = self.log.index, self.reader.breaker.num_opened + self.writer.breaker.num_opened
        return MediumCounts(index.num_pages, index.nbytes, self.writer.counts, self.reader.counts, num_opened)

    @property
    def num_pages(self) -> int:
        return self.log.index.num_pages

    @property
    def is_asked(self) -> bool:
        return self.reader.is_asked

    def has(self, page_id: PageId) -> bool:
        return self.log.index.find(page_id.key) is not None

    def lose(self, page_id: PageId) -> None:
        self.log.index.lose(page_id.key)

    def load_s(self, num_pages: int) -> float:
        return self.reader.load_s(num_pages)

    def keep(self, places: I32, ids: Sequence[PageId]) -> list[bool]:
        kept = [self._keep(place, page_id) for place, page_id in zip(places.tolist(), ids, strict=True)]
        self.writer.submit()
        return kept

    def finish_copies(self) -> None:
        """All is copied on return of `keep`."""

    def _keep(self, place: int, page_id: PageId) -> bool:
        at = self.log.index.find(page_id.key)
        if at is not None and not self.log.index.is_old(at):
            return True
        is_given = self.writer.is_pending(page_id.key) or self.writer.give(page_id, self._above[place])
        return is_given or at is not None

    def forget(self, ids: Sequence[PageId]) -> None:
        for page_id in ids:
            self.lose(page_id)
        self.writer.forget(ids, ids)

    def load(self, number: int, ids: Sequence[PageId], pages: Pages) -> None:
        runs, is_whole = self._runs(ids, pages)
        self.reader.load(number, runs, is_whole)

    def restored(self) -> Sequence[PagesRestored]:
        return self.reader.restored()

    def descriptors(self) -> Sequence[int]:
        return (self.reader.fileno(),)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()

    def finish_writes(self) -> None:
        self.writer.finish()

    def _runs(self, ids: Sequence[PageId], pages: Pages) -> tuple[list[Run], bool]:
        """Return what to read, and whether that is all."""
        runs: list[Run] = []
        size = self.log.record.record_nbytes
        longest = max(1, min(RUN_PAGES, RUN_NBYTES // size))
        for page_id, page in zip(ids, pages.tolist(), strict=True):
            at = self.log.find(page_id.key)
            if at is None:
                return runs, False
            path, offset = at
            last = runs[-1] if runs else None
            follows = last is not None and last.where == path and last.offset + len(last.ids) * size == offset
            if last is None or not follows or len(last.ids) == longest:
                last = Run(path, offset, [], [])
                runs.append(last)
            last.ids.append(page_id)
            last.pages.append(page)
        return runs, True


class _Segments:
    """Implements `Source`."""

    def __init__(self, log: SegmentLog, disk: Disk) -> None:
        self._log = log
        self._disk = disk
        self.name = str(log.folder)

    def new_reader(self) -> FileReader:
        return FileReader(max(RUN_NBYTES, self._log.record.record_nbytes), self._disk)

    def to_measure(self) -> Path | None:
        return self._log.newest()

    def lose(self, run: Run, page_id: PageId) -> None:
        self._log.index.lose(page_id.key)

    def miss(self, run: Run) -> None:
        """It has gone with its segment, as the index knows."""


class FileReader:
    """Implements `RecordReader`. It has descriptors of its own: the system reads ahead for each by itself."""

    def __init__(self, nbytes: int, disk: Disk) -> None:
        self._disk = disk
        self._memory = memoryview(mmap.mmap(-1, nbytes))
        self._open: dict[Path, int] = {}  # used last comes last

    def prepare(self, run: Run) -> None:
        self._descriptor(run.where)

    def read_cached(self, run: Run, buffers: Sequence[Any]) -> int:
        return self._disk.read_cached(self._open[run.where], buffers, run.offset)

    def read(self, run: Run, nbytes: int) -> Buffer:
        num_read = self._disk.read(self._descriptor(run.where), [self._memory[:nbytes]], run.offset)
        return self._memory[:num_read]

    def measure(self, where: Path) -> tuple[int, float]:
        began_s = time.monotonic()
        descriptor = self._descriptor(where)
        os.posix_fadvise(descriptor, 0, len(self._memory), os.POSIX_FADV_DONTNEED)
        num_read = self._disk.read(descriptor, [self._memory], 0)
        return num_read, time.monotonic() - began_s

    def rest(self) -> None:
        """Close what would keep deleted files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, path: Path) -> int:
        """Return one of a file, to be used before the next is asked for. Raises `OSError`."""
        found = self._open.pop(path, None)
        if found is None:
            if len(self._open) == MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            found = self._disk.open_to_read(path)
        self._open[path] = found
        return found


class _Appending:
    """Implements `Sink`."""

    def __init__(self, log: SegmentLog) -> None:
        self._log = log
        self._start = 0  # of what was written last
        self.name = str(log.folder)

    def write(self, data: memoryview, used: int, ids: Sequence[PageId]) -> int:
        end = used + -used % BLOCK
        data[used:end] = bytes(end - used)
        self._start = self._log.write(data[:end])
        return end

    def publish(self, ids: Sequence[PageId], lost: Set[bytes]) -> None:
        self._log.add(self._start, ids, lost)

    def drop(self, ids: Sequence[PageId]) -> None:
        self._log.drop(self._log.index.holding(page_id.key for page_id in ids))

    def make_room(self) -> None:
        self._log.make_room()

    def close(self) -> None:
        self._log.close()
