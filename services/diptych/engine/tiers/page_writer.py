"""Writes pages to a medium in a thread of its own: who gives one waits for a copy in memory, never for the medium.

What is given while something is written goes out together afterwards, or each run of pages by itself. Digests are made
while pages are copied. There are few buffers, and what waits in them is bounded in seconds as well, by the speed of
late: a page that finds no place is dropped and counted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from diptych.engine.cache.page_ids import NOBODYS, PageId
from diptych.engine.tiers.breaker import Breaker
from diptych.engine.tiers.page_format import HEADER_NBYTES, PageFormat, header
from diptych.engine.tiers.record_bytes import Gatherer

logger = logging.getLogger(__name__)

DROP_S: Final = 1.0  # after which it is looked whether what could not be dropped may be tried again
LONGEST_QUEUE_S: Final = 2.0  # of what waits to be written
SPEED_KEPT: Final = 0.75  # of what was known of the medium's speed, when one more write has ended
JOIN_S: Final = 2.0  # that a thread gets to end


class Sink(Protocol):
    """Where batches of records go. One thread calls it."""

    @property
    def name(self) -> str:
        """For logs."""
        ...

    def write(self, data: memoryview, used: int, ids: Sequence[PageId]) -> int:
        """Write the records in the first `used` bytes of a buffer; return how many bytes the medium took.

        Of `NOBODYS` nobody is to find what is written. Raises `OSError`: then nobody finds any of them.
        """
        ...

    def publish(self, ids: Sequence[PageId], lost: Set[bytes]) -> None:
        """Let what was written last be found, but for keys that are lost."""
        ...

    def drop(self, ids: Sequence[PageId]) -> None:
        """Let nobody find these pages, nor in a later life. Raises `OSError`: then it is asked again later."""
        ...

    def make_room(self) -> None:
        """The medium is full. Raises `OSError`."""
        ...

    def close(self) -> None:
        """Nothing is written any more. Raises `OSError`."""
        ...


class _Batch:
    """A buffer of records, which fill it from its beginning."""

    def __init__(self, nbytes: int, record_nbytes: int) -> None:
        self.data = huge_buffer(nbytes)
        self.ids: list[PageId] = []
        self.keys: list[bytes] = []
        self._record_nbytes = record_nbytes

    @property
    def used(self) -> int:
        return len(self.ids) * self._record_nbytes

    @property
    def num_left(self) -> int:
        """Records that still have a place."""
        return len(self.data) // self._record_nbytes - len(self.ids)

    def clear(self) -> None:
        self.ids, self.keys = [], []


def huge_buffer(nbytes: int) -> memoryview:
    """Return a buffer in large pages of the system, where there are some: a device takes twice as much from these."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


@dataclass(slots=True)
class WriteCounts:
    """Since start."""

    num_pages: int = 0
    nbytes: int = 0  # with headers
    num_dropped: int = 0  # pages, for want of a place in the queue
    num_failed: int = 0  # pages of writes that failed


@dataclass(slots=True)
class _Queue:
    """What the threads share, under one lock."""

    free: list[_Batch]
    filling: _Batch | None = None
    full: deque[_Batch] = field(default_factory=deque)
    pending: set[bytes] = field(default_factory=set)  # keys of all that is not written yet
    forgotten: dict[PageId, int] = field(default_factory=dict)  # what goes next, and when it was last said so
    num_forgets: int = 0
    lost: set[bytes] = field(default_factory=set)  # of `pending`, what nobody is to find
    is_closing: bool = False


class PageWriter:
    """One thread gives pages; the writer's own calls the sink. `close` it."""

    def __init__(
        self,
        sink: Sink,
        record: PageFormat,
        rows: Any,
        clock: Callable[[], float],
        on_written: Callable[[], None],
        *,
        num_buffers: int,
        buffer_nbytes: int,
    ) -> None:
        """`rows`: bytes `[number, page_nbytes]`, of which pages are. `on_written` is called in the writer's thread."""
        self.counts = WriteCounts()
        self.breaker = Breaker()
        self._drops = Breaker()  # a store may let us write, and not delete
        self._sink = sink
        self._terms = record.terms
        self._clock = clock
        self._on_written = on_written
        self._size = record.record_nbytes
        self._gatherer = Gatherer(record, rows)
        self._queue = _Queue([_Batch(buffer_nbytes, self._size) for _ in range(num_buffers)])
        self._bytes_per_s = 0.0  # 0: not known
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tier-writer", daemon=True)
        self._thread.start()

    def is_pending(self, key: bytes) -> bool:
        return key in self._queue.pending

    def give(self, ids: Sequence[PageId], pages: Sequence[int]) -> int:
        """Copy pages to be written; return how many of them, as the last are dropped for which there is no place.

        `submit` when there are no more.
        """
        given = 0
        while given < len(ids) and (batch := self._take_batch()) is not None:
            end = min(len(ids), given + batch.num_left)
            self._fill(batch, ids[given:end], pages[given:end])
            with self._changed:
                self._queue.filling = batch
            given = end
        self.counts.num_dropped += len(ids) - given
        return given

    def give_run(self, ids: Sequence[PageId], pages: Sequence[int]) -> bool:
        """Copy pages to be written by themselves, all of which have place in a buffer; False: they are dropped."""
        with self._changed:
            batch = self._queue.free.pop() if self._queue.free and self._takes_more() else None
        if batch is None:
            self.counts.num_dropped += len(ids)
            return False
        self._fill(batch, ids, pages)
        with self._changed:
            self._queue.full.append(batch)
            self._changed.notify()
        return True

    def _take_batch(self) -> _Batch | None:
        """Take the batch that has a place for one more page, out of reach of the writer; None: there is none."""
        queue = self._queue
        with self._changed:
            if queue.filling is not None and not queue.filling.num_left:
                queue.full.append(queue.filling)
                queue.filling = None
                self._changed.notify()
            if not self._takes_more():
                return None
            batch, queue.filling = queue.filling, None
            return batch if batch is not None else queue.free.pop() if queue.free else None

    def _fill(self, batch: _Batch, ids: Sequence[PageId], pages: Sequence[int]) -> None:
        """Copy pages, while the writer goes on."""
        self._gatherer.gather(batch.data[batch.used :], ids, pages)
        keys = [page_id.key for page_id in ids]
        batch.ids.extend(ids)
        batch.keys.extend(keys)
        with self._changed:
            self._queue.pending.update(keys)

    def submit(self) -> None:
        """Have written what was given, if there is any: to wake a thread for nothing costs a step time."""
        if self._queue.filling is not None:
            with self._changed:
                self._changed.notify()

    def is_forgotten(self, page_id: PageId) -> bool:
        """Whether the sink has still to drop a page."""
        return page_id in self._queue.forgotten

    def forget(self, ids: Sequence[PageId], dropped: Sequence[PageId]) -> None:
        """Publish none of either that waits here, and let the sink drop `dropped`: later, if the medium fails."""
        queue = self._queue
        with self._changed:
            queue.lost.update(queue.pending.intersection(page_id.key for page_id in (*ids, *dropped)))
            queue.num_forgets += 1
            queue.forgotten.update(dict.fromkeys(dropped, queue.num_forgets))
            self._changed.notify()

    def finish(self) -> None:
        """Return when all that was given is written or lost. For tests and benchmarks: this waits for the medium."""
        with self._changed:
            self._changed.notify()
            self._changed.wait_for(lambda: not self._queue.pending and not self._queue.forgotten)

    def close(self) -> None:
        """Write what was given, as far as the medium answers soon."""
        with self._changed:
            self._queue.is_closing = True
            self._changed.notify()
        self._thread.join(JOIN_S)

    def _takes_more(self) -> bool:
        return self.breaker.allows(self._clock()) and self._waiting_s() <= LONGEST_QUEUE_S

    def _waiting_s(self) -> float:
        return len(self._queue.pending) * self._size / self._bytes_per_s if self._bytes_per_s else 0.0

    # the writer's thread

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            self._write(batch)
            with self._changed:
                self._queue.pending.difference_update(batch.keys)
                self._queue.lost.difference_update(batch.keys)
                batch.clear()
                self._queue.free.append(batch)
                self._changed.notify_all()
            self._on_written()
        if self._queue.forgotten:
            logger.warning("%d pages that are not to be found stay in %s", len(self._queue.forgotten), self._sink.name)
        try:
            self._sink.close()
        except OSError as error:
            logger.warning("%s is not closed as it should be: %s", self._sink.name, error)

    def _next(self) -> _Batch | None:
        """Wait for pages to write; None: it is over."""
        queue = self._queue
        while True:
            with self._changed:
                while not (queue.full or queue.filling or queue.is_closing or self._may_drop()):
                    self._changed.wait(DROP_S if queue.forgotten else None)
                forgotten, batch = queue.forgotten.copy() if self._may_drop() else {}, None
                if queue.full:
                    batch = queue.full.popleft()
                elif queue.filling is not None:
                    batch, queue.filling = queue.filling, None
            if forgotten:
                self._drop(forgotten)
            if batch is not None or (not forgotten and queue.is_closing):
                return batch

    def _may_drop(self) -> bool:
        return bool(self._queue.forgotten) and self._drops.allows(self._clock())

    def _drop(self, forgotten: Mapping[PageId, int]) -> None:
        """Have pages dropped; what can't be is tried again when the medium may be asked, and found by nobody here."""
        self._drops.begin(self._clock())
        try:
            self._sink.drop([*forgotten])
        except OSError as error:
            logger.warning("%d pages stay in %s until it is asked again: %s", len(forgotten), self._sink.name, error)
            self._drops.fail(self._clock())
            return
        self._drops.succeed()
        with self._changed:
            for page_id, said in forgotten.items():
                if self._queue.forgotten.get(page_id) == said:
                    del self._queue.forgotten[page_id]
            self._changed.notify_all()

    def _write(self, batch: _Batch) -> None:
        """Write a batch, which is found from then on, but for what was forgotten: before or while it is written."""
        began_s = self._clock()
        self.breaker.begin(began_s)
        with self._changed:
            ids = batch.ids
            if self._queue.lost or self._queue.forgotten:
                ids = [NOBODYS if self._is_lost(page_id) else page_id for page_id in ids]
        for number in [number for number, page_id in enumerate(ids) if page_id is NOBODYS]:
            record = batch.data[number * self._size : (number + 1) * self._size]
            record[:HEADER_NBYTES] = header(self._terms, NOBODYS, record[HEADER_NBYTES:])
        try:
            nbytes = self._sink.write(batch.data, batch.used, ids)
        except OSError as error:
            self._fail(error, len(ids))
            return
        with self._changed:
            self._sink.publish(ids, self._queue.lost)
        self.breaker.succeed()
        if not nbytes:  # it was there
            return
        self.counts.num_pages += len(batch.ids)
        self.counts.nbytes += nbytes
        speed = nbytes / max(1e-9, self._clock() - began_s)
        self._bytes_per_s = SPEED_KEPT * (self._bytes_per_s or speed) + (1 - SPEED_KEPT) * speed

    def _is_lost(self, page_id: PageId) -> bool:
        return page_id.key in self._queue.lost or page_id in self._queue.forgotten

    def _fail(self, error: OSError, num_pages: int) -> None:
        """A write has failed. A medium that is full gets room: what waits is dropped, but not what comes later."""
        logger.warning("%d pages were not written to %s: %s", num_pages, self._sink.name, error)
        self.counts.num_failed += num_pages
        self.breaker.fail(self._clock())
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._make_room()

    def _make_room(self) -> None:
        try:
            self._sink.make_room()
        except OSError as error:
            logger.warning("nothing can be deleted in %s: %s", self._sink.name, error)
