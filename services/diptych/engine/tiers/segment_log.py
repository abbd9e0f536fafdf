"""The files of a segment log: a folder of one process, which others leave alone while it lives.

    ROOT / digest of the terms / number / lock, 00000001.segment, ...

A process takes the first number whose lock is free, so that after a restart it finds what it had. Folders of the same
terms are never emptied by others: those that start together take them one behind the other. Of other terms, what nobody
has locked is bounded by the capacity of whoever starts, once it is unused for hours, or when the medium is full. That
happens when something is written first, not before: by then all ranks of a worker have taken their folders, each of
which is of terms of its own.

Nothing is synced: a process that is killed leaves what it wrote to the system, and what a machine loses by a power cut
is found by its digest. One thread writes; others open and read the files at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import mmap
import os
import time
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Final

from diptych.common.errors import ConfigError
from diptych.engine.cache.page_ids import NOBODYS, PageId
from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.segments import BLOCK, TRAILER_NBYTES, Location, SegmentFormat, SegmentIndex, Table

logger = logging.getLogger(__name__)

SUFFIX: Final = ".segment"
LOCK: Final = "lock"
UNUSED_S: Final = 6 * 3600.0  # after which a folder of other terms may be emptied
ENDING_S: Final = 5.0  # that the last user of a folder may still take to end
RETRY_S: Final = 0.02


class SegmentLog:
    """Pages by their keys, in the files of a folder. Opening it finds what earlier lives left."""

    def __init__(
        self, root: Path, record: SegmentFormat, capacity_nbytes: int, disk: Disk, number: int | None = None
    ) -> None:
        """`number`: of the folder; None: the first that is free. Raises `ConfigError` where it can't be used."""
        self.record = record
        self.index = SegmentIndex(capacity_nbytes, record.record_nbytes)
        self._root = root
        self._disk = disk
        self._files: dict[int, Path] = {}
        self._looks_at_others = True  # at the first write
        self._current: tuple[int, int, int] | None = None  # number, descriptor to write by, bytes
        self._keys: list[bytes] = []  # of the current one
        self._offsets: list[int] = []
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _alone(self._root):
                of_terms = root / record.terms.hex()
                taken = _take_folder(of_terms) if number is None else _take_this_folder(of_terms / str(number))
                self.folder, self._lock = taken
            self._reopen()
        except OSError as error:
            raise ConfigError(f"--file-cache-dir {root} can't be used: {error}") from None
        self._next = max(self._files, default=0) + 1

    @property
    def number(self) -> int:
        """Which of the folders of these terms it is."""
        return int(self.folder.name)

    def find(self, key: bytes) -> tuple[Path, int] | None:
        """Return the file and the offset of a page's record. The file may be gone when it is opened."""
        at = self.index.find(key)
        file = None if at is None else self.file(at)
        return None if at is None or file is None else (file, at.offset)

    def file(self, at: Location) -> Path | None:
        """Return the file of a record, unless it has gone."""
        return self._files.get(at.segment)

    def newest(self) -> Path | None:
        """Return the segment that was begun last."""
        numbers = [*self._files]  # at once, as the writer may add one
        return self._files.get(max(numbers)) if numbers else None

    def write(self, data: memoryview) -> int:
        """Write records, which fill `data` from its beginning, up to a multiple of `BLOCK`; return where they are.

        `add` lets them be found. Raises `OSError`: then none of them is found, now or later.
        """
        if self._current is None or self._current[2] + len(data) > self.index.segment_nbytes:
            self._complete_if_possible()
            self._begin(len(data))
        assert self._current is not None
        number, descriptor, start = self._current
        try:
            self._disk.write(descriptor, data, start)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, start)
            raise
        self._current = number, descriptor, start + len(data)
        return start

    def add(self, start: int, ids: Sequence[PageId], lost: Set[bytes]) -> None:
        """Let pages be found whose records were written last, at `start`: not the keys that are lost.

        Of those, the segments that hold them must be dropped before the next write, but for `NOBODYS`, which is left
        out wherever it is.
        """
        assert self._current is not None
        number, _, end = self._current
        size = self.record.record_nbytes
        kept = [(page_id.key, start + at * size) for at, page_id in enumerate(ids) if page_id != NOBODYS]
        table = Table([key for key, _ in kept], [offset for _, offset in kept])
        self._keys.extend(table.keys)
        self._offsets.extend(table.offsets)
        self.index.add(number, table, end, lost)

    def complete(self) -> None:
        """Write the footer of the current segment, if there is one. Raises `OSError`: then it has none."""
        if self._current is None:
            return
        (number, descriptor, end), self._current = self._current, None
        table, self._keys, self._offsets = Table(self._keys, self._offsets), [], []
        try:
            self._write_footer(number, descriptor, end, table)
        finally:
            os.close(descriptor)

    def _complete_if_possible(self) -> None:
        try:
            self.complete()
        except OSError as error:
            logger.warning("a segment in %s has no footer, so it is searched when opened: %s", self.folder, error)

    def drop(self, segments: Sequence[int]) -> None:
        """Delete segments and forget what is only in them; not the one that is written to, but for the last time."""
        for number in segments:
            self.index.drop(number)
            if self._current is not None and self._current[0] == number:
                descriptor = self._current[1]
                self._current, self._keys, self._offsets = None, [], []
                _close(descriptor)
            _delete(self._files.pop(number))

    def make_room(self) -> None:
        """The medium is full: drop the oldest segment but the current one, or else what other terms left unused."""
        oldest = self.index.segments[:-1][:1]
        self.drop(oldest)
        if not oldest:
            with _alone(self._root):
                _empty_unused(self._others(), 0, math.inf)

    def close(self) -> None:
        """Raises `OSError`: then the last segment has no footer."""
        try:
            self.complete()
        finally:
            with contextlib.suppress(OSError):
                os.utime(self.folder / LOCK)
            os.close(self._lock)

    def _others(self) -> list[Path]:
        """Return the folders of other terms, those that were used last first."""
        found = [path.parent for path in self._root.glob(f"*/*/{LOCK}") if path.parent.parent != self.folder.parent]
        return sorted(found, key=_used_s, reverse=True)

    def _begin(self, coming_nbytes: int) -> None:
        """Begin a segment."""
        if self._looks_at_others:
            self._looks_at_others = False
            self._bound_others()
        self.drop(self.index.excess(max(self.index.segment_nbytes, coming_nbytes)))
        number, self._next = self._next, self._next + 1
        path = self.folder / f"{number:08d}{SUFFIX}"
        writing = self._disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._current = number, writing, 0
        self._files[number] = path
        self.index.add(number, Table([], []), 0)

    def _bound_others(self) -> None:
        try:
            with _alone(self._root):
                _empty_unused(self._others(), self.index.capacity_nbytes, _used_s(self.folder) - UNUSED_S)
        except OSError as error:
            logger.warning("what other terms have left in %s can't be looked at: %s", self._root, error)

    def _write_footer(self, number: int, descriptor: int, end: int, table: Table) -> None:
        if not table.keys:
            self.drop([number])
            return
        footer = self.record.footer(end, table)
        with mmap.mmap(-1, len(footer)) as aligned, memoryview(aligned) as data:
            data[:] = footer
            self._disk.write(descriptor, data, end)
        self.index.add(number, Table([], []), end + len(footer))

    def _reopen(self) -> None:
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if not path.stem.isdecimal():
                logger.warning("%s is no file of a cache: it is left alone", path)
                continue
            try:
                table, size = self._read(path)
            except OSError as error:
                logger.warning("%s can't be read, and goes: %s", path, error)
                table, size = Table([], []), 0
            if table.keys:
                number = int(path.stem)
                self._files[number] = path
                self.index.add(number, table, size)
            else:
                _delete(path)
        self.drop(self.index.excess(0))

    def _read(self, path: Path) -> tuple[Table, int]:
        """Return the pages of a segment, and its bytes. Raises `OSError`."""
        with open(path, "r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            table = self._read_footer(file.fileno(), size)
            return (table, size) if table is not None else self._salvage(path, file.fileno(), size)

    def _read_footer(self, descriptor: int, size: int) -> Table | None:
        trailer = os.pread(descriptor, TRAILER_NBYTES, max(0, size - TRAILER_NBYTES))
        where = self.record.table_range(trailer, size)
        if where is None:
            return None
        data = os.pread(descriptor, where[1] - where[0], where[0])
        return self.record.read_table(data, trailer) if len(data) == where[1] - where[0] else None

    def _salvage(self, path: Path, descriptor: int, size: int) -> tuple[Table, int]:
        """Cut off what is torn of a segment that was not completed, and complete it if that can be written."""
        table, end = self.record.salvage(lambda offset, nbytes: os.pread(descriptor, nbytes, offset))
        logger.warning("%s was not completed: %d pages of it are sound", path, len(table.keys))
        end += -end % BLOCK
        footer = self.record.footer(end, table)
        try:
            os.ftruncate(descriptor, end)
            self._disk.write(descriptor, memoryview(footer), end)
        except OSError as error:
            logger.warning("%s stays without a footer: %s", path, error)
        return table, end + len(footer)


def _delete(path: Path) -> None:
    """Delete a segment, or at least what is in it, so that nobody finds that later."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s can't be deleted, and is emptied: %s", path, error)
        with contextlib.suppress(OSError):
            os.truncate(path, 0)


def _close(descriptor: int) -> None:
    """Close a file of which nothing is wanted any more."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _take_folder(of_terms: Path) -> tuple[Path, int]:
    """Return the first folder that no process has, and the lock of it."""
    number = 0
    while True:
        folder = of_terms / str(number)
        for path in (of_terms, folder):
            path.mkdir(exist_ok=True, mode=0o700)
        lock = _locked(folder)
        if lock is not None:
            os.utime(folder / LOCK)
            return folder, lock
        number += 1


def _take_this_folder(folder: Path) -> tuple[Path, int]:
    """Return a folder and the lock of it, which a process that ends may still have. Raises `OSError`."""
    for path in (folder.parent, folder):
        path.mkdir(exist_ok=True, mode=0o700)
    until_s = time.monotonic() + ENDING_S
    while (lock := _locked(folder)) is None:
        if time.monotonic() > until_s:
            raise OSError(f"another process has {folder}")
        time.sleep(RETRY_S)
    os.utime(folder / LOCK)
    return folder, lock


def _locked(folder: Path) -> int | None:
    """Return the lock of a folder; None: another process has it."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _used_s(folder: Path) -> float:
    """Return when a process took or left a folder, or began a segment in it; by the clock of files."""
    return max(folder.stat().st_mtime, (folder / LOCK).stat().st_mtime)


def _empty_unused(folders: Sequence[Path], most_nbytes: int, until_s: float) -> None:
    """Delete the segments of folders that no process has, behind the first that hold so many bytes.

    What was used later than `until_s`, of the clock of files, stays.
    """
    left = most_nbytes
    for folder in folders:
        is_old = _used_s(folder) <= until_s
        with _if_unused(folder) as is_unused:
            segments = [*folder.glob(f"*{SUFFIX}")] if is_unused else []
            left -= sum(segment.stat().st_size for segment in segments)
            for segment in segments if is_old and left < 0 else ():
                _delete(segment)


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Wait until no other process takes or empties folders: who looks at one has its lock for a moment."""
    lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _if_unused(folder: Path) -> Iterator[bool]:
    lock = _locked(folder)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)
