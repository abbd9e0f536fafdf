"""The host tier's copies on a GPU, beside its steps: which may overtake which, and how the host hears of their end.

Rules, in the order in which a page meets them:

1. An evicted page is *read* into a buffer on the GPU. It may be read while a step runs: the steps that computed it are
   over (see `stream_queues`). Steps that are queued later, and restores, wait for the read on the device; a peer, which
   waits for nothing on this device, is let in by `finish_saves`.
2. From the buffer it is *saved* to its slot. The buffer has parts that take turns. One is read into again only when it
   was saved: that is what holds back whoever evicts faster than the bus can carry.
3. A *restore* waits for all reads, and for the save into its slots, if that may still be on its way. The host is told
   when the device has done it, by a thread that waits for nothing else. Nobody touches its slots and pages until then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final, Protocol

import numpy as np

from diptych.common.arrays import I32, I64
from diptych.engine.cache.tier import Slots
from diptych.engine.runner.gpu.copy_queues import CopyQueues, Mark
from diptych.kvtransfer.ownership import Pages

NUM_PARTS: Final = 4  # of the buffer: one is read into while others are saved


class Movement(Protocol):
    """Queues copies of pages; see `PageMovement`."""

    def read(self, pages: I64, first: int) -> None: ...

    def save(self, first: int, slots: I64) -> None: ...

    def restore(self, slots: I64, pages: I64) -> None: ...


class GpuHostPages:
    """Implements `PageCopier`. One thread calls it: the one that queues steps. `close` it."""

    def __init__(self, movement: Movement, queues: CopyQueues, num_slots: int, num_buffered: int) -> None:
        """`num_buffered`: pages of the buffer, at least `NUM_PARTS`."""
        self._movement = movement
        self._queues = queues
        self._part_len = num_buffered // NUM_PARTS
        self._saved: list[Mark | None] = [None] * NUM_PARTS  # by part: what was read into it last is in host memory
        self._num_parts = 0  # filled since start
        self._part_of = np.full(num_slots, -NUM_PARTS, np.int64)  # by slot: number of the part that brought its page
        self._last_read: Mark | None = None
        self._is_read = True  # the host knows that the last read is over
        self._ends = Ends()

    def save(self, pages: Pages, slots: Slots) -> None:
        pages, slots = last_of_each(pages, slots)
        for start in range(0, len(pages), self._part_len):
            part = slice(start, start + self._part_len)
            self._save_part(pages[part].astype(np.int64), slots[part].astype(np.int64))
        if self._last_read is not None:
            self._queues.steps.wait(self._last_read)

    def finish_saves(self) -> None:
        """The host waits for a copy within the GPU, and for the bus only where the buffer was full."""
        if self._last_read is not None and not self._is_read:
            self._last_read.wait()
            self._is_read = True

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        queue = self._queues.restores
        queue.wait(self._queues.reads.mark())
        newest = int(self._part_of[slots].max())
        mark = self._saved[newest % NUM_PARTS]
        if mark is not None and newest > self._num_parts - NUM_PARTS - 1:  # else a later read has waited for it
            queue.wait(mark)
        from_slots, to_pages = slots.astype(np.int64), pages.astype(np.int64)
        queue.put(lambda: self._movement.restore(from_slots, to_pages))
        self._ends.expect(number, queue.mark())
        return False

    def restored(self) -> Sequence[int]:
        return self._ends.pop()

    def descriptors(self) -> Sequence[int]:
        return (self._ends.fileno(),)

    def close(self) -> None:
        self._ends.close()
        for mark in self._saved:
            if mark is not None:
                mark.wait()

    def _save_part(self, pages: I64, slots: I64) -> None:
        turn, queues = self._num_parts % NUM_PARTS, self._queues
        first, is_free = turn * self._part_len, self._saved[turn]
        if is_free is not None:
            queues.reads.wait(is_free)
        queues.reads.put(lambda: self._movement.read(pages, first))
        self._last_read, self._is_read = queues.reads.mark(), False
        queues.saves.wait(self._last_read)
        queues.saves.put(lambda: self._movement.save(first, slots))
        self._saved[turn] = queues.saves.mark()
        self._part_of[slots] = self._num_parts
        self._num_parts += 1


def last_of_each(pages: Pages, slots: Slots) -> tuple[I32, I32]:
    """Leave out pages whose slot is listed again behind them: copies of one call are made in any order."""
    _, places = np.unique(slots[::-1], return_index=True)
    if len(places) == len(slots):
        return pages, slots
    kept = np.sort(len(slots) - 1 - places)
    return pages[kept], slots[kept]


class Ends:
    """Waits for marks, one after the other, in a thread of its own."""

    def __init__(self) -> None:
        self._expected: SimpleQueue[tuple[int, Mark] | None] = SimpleQueue()
        self._ended: SimpleQueue[int | Exception] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._thread = threading.Thread(target=self._run, name="restores", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return what is readable while `pop` has something."""
        return self._wake

    def expect(self, number: int, mark: Mark) -> None:
        self._expected.put((number, mark))

    def pop(self) -> list[int]:
        """Return what has ended since the last call, without waiting. Raises what the device has said instead."""
        numbers = []
        while not self._ended.empty():
            os.eventfd_read(self._wake)
            ended = self._ended.get()
            if isinstance(ended, Exception):
                raise ended
            numbers.append(ended)
        return numbers

    def close(self) -> None:
        """Wait for all marks."""
        self._expected.put(None)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while (expected := self._expected.get()) is not None:
            ended = self._waited(*expected)
            os.eventfd_write(self._wake, 1)  # first: then the queue never holds more than the descriptor says
            self._ended.put(ended)

    def _waited(self, number: int, mark: Mark) -> int | Exception:
        try:
            mark.wait()
        except Exception as error:  # a device that has failed ends the worker, in the thread that steps
            return error
        return number
