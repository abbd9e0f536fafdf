"""Reads records from files, what the system has in memory straight into pages: the system copies once."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any, Final

from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.page_format import Buffer
from diptych.engine.tiers.record_bytes import Landing
from diptych.engine.tiers.records import Run

# that it waits for at once, with headers, so that a run of 1 MiB is one read: who waits more often is late more often
READ_NBYTES: Final = 2**20 + 2**16
MOST_OPEN: Final = 4  # files of a reader, while it is busy


class FileReader:
    """Implements `RecordReader`. It has descriptors of its own: the system reads ahead for each by itself."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        """`folder`: to which the paths of runs are relative."""
        self._disk = disk
        self._folder = folder
        self._memory = memoryview(mmap.mmap(-1, READ_NBYTES))
        self._open: dict[Any, int] = {}  # used last comes last

    def prepare(self, run: Run) -> None:
        self._descriptor(run.where)

    def read_cached(self, run: Run, landing: Landing) -> None:
        self._disk.read_cached(self._open[run.where], landing, run.offset)

    def read(self, run: Run, start: int, nbytes: int) -> Buffer:
        come = self._disk.read(self._descriptor(run.where), [self._memory[:nbytes]], run.offset + start)
        return self._memory[:come]

    def measure(self, where: Any) -> tuple[int, float]:
        self._disk.forget(self._folder / where, READ_NBYTES)
        began_s = time.monotonic()
        num_read = self._disk.read(self._descriptor(where), [self._memory], 0)
        return num_read, time.monotonic() - began_s

    def rest(self) -> None:
        """Close what would keep deleted files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, path: Any) -> int:
        """Return one of a file, to be used before the next is asked for. Raises `OSError`."""
        found = self._open.pop(path, None)
        if found is None:
            if len(self._open) == MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            found = self._disk.open_to_read(self._folder / path)
        self._open[path] = found
        return found
