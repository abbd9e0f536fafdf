"""Pages in the files of a segment log: given, found by their keys, read back. Implements `Medium`.

A page that is in the log already is not written again unless it would go with the next segments.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, Final

import numpy as np

from diptych.common.arrays import I32
from diptych.engine.cache.page_ids import PageId
from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.file_reader import FileReader
from diptych.engine.tiers.medium import MediumCounts
from diptych.engine.tiers.page_reader import RUN_PAGES, PageReader
from diptych.engine.tiers.page_writer import PageWriter
from diptych.engine.tiers.records import Run
from diptych.engine.tiers.segment_log import SegmentLog
from diptych.engine.tiers.segments import BLOCK, Location, SegmentFormat
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages

NUM_READERS: Final = 2
RUN_NBYTES: Final = 2**21  # that a thread reads one behind the other, or one page
READ_S: Final = 1.0  # after which a read counts as hanging
NUM_BUFFERS: Final = 8  # of what waits to be written
BUFFER_NBYTES: Final = 4 * 2**20


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
        self.reader = PageReader(
            _Segments(self.log, disk), record, pool, clock, num_readers=NUM_READERS, hangs_s=READ_S
        )
        buffer_nbytes = max(BUFFER_NBYTES, -(-record.record_nbytes // BLOCK) * BLOCK)
        self.writer = PageWriter(
            _Appending(self.log),
            record,
            above,
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
        new: dict[PageId, int] = {}
        for place, page_id in zip(places.tolist(), ids, strict=True):
            if self._is_to_be_written(page_id):
                new.setdefault(page_id, place)
        num_given = self.writer.give([*new], [*new.values()])
        self.writer.submit()
        dropped = set([*new][num_given:])
        return [page_id not in dropped or self.has(page_id) for page_id in ids]

    def finish_copies(self) -> None:
        """All is copied on return of `keep`."""

    def _is_to_be_written(self, page_id: PageId) -> bool:
        at = self.log.index.find(page_id.key)
        return (at is None or self.log.index.is_old(at)) and not self.writer.is_pending(page_id.key)

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
        size, of_pool = self.log.record.record_nbytes, pages.tolist()
        longest = max(1, min(RUN_PAGES, RUN_NBYTES // size))
        places = self.log.index.places([page_id.key for page_id in ids])
        if places is None:
            return runs, False
        cuts = [0, *(np.flatnonzero(np.diff(places) != size) + 1).tolist(), len(ids)]
        for first, end in itertools.pairwise(cuts):
            for start in range(first, end, longest):
                stop, at = min(end, start + longest), Location.of(int(places[start]))
                path = self.log.file(at)
                if path is None:
                    return runs, False
                runs.append(Run(path, at.offset, [*ids[start:stop]], of_pool[start:stop]))
        return runs, True


class _Segments:
    """Implements `Source`."""

    def __init__(self, log: SegmentLog, disk: Disk) -> None:
        self._log = log
        self._disk = disk
        self.name = str(log.folder)

    def new_reader(self) -> FileReader:
        return FileReader(self._disk, Path())  # which has whole paths

    def to_measure(self) -> Path | None:
        return self._log.newest()

    def lose(self, run: Run, page_id: PageId) -> None:
        self._log.index.lose(page_id.key)

    def miss(self, run: Run) -> None:
        """It has gone with its segment, as the index knows."""


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
