"""Devices without one: queues that go on when the test lets them, in any order that their marks allow, or at once."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from diptych.common.arrays import I64, U64
from diptych.engine.runner.gpu.copy_queues import CopyQueues, Mark


class EmulatedMark:
    """Implements `Mark`."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._reached = threading.Event()

    @property
    def is_reached(self) -> bool:
        return self._reached.is_set()

    def reach(self) -> None:
        self._reached.set()

    def wait(self) -> None:
        """The test's own thread can't wait for what it has to do itself."""
        if threading.get_ident() != self._device.thread:
            self._reached.wait()
        while not self.is_reached:
            assert self._device.advance(), "nothing leads there"


class EmulatedQueue:
    """Implements `Queue`."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._work: deque[Callable[[], bool]] = deque()  # each returns whether it could be done

    def put(self, work: Callable[[], None]) -> None:
        self._work.append(lambda: _done(work))

    def mark(self) -> Mark:
        mark = EmulatedMark(self._device)
        self._work.append(lambda: _done(mark.reach))
        return mark

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, EmulatedMark)
        self._work.append(lambda: mark.is_reached)

    def advance(self) -> bool:
        if not self._work or not self._work[0]():
            return False
        self._work.popleft()
        return True


def _done(work: Callable[[], None]) -> bool:
    work()
    return True


class EmulatedDevice:
    """Queues of one device. `advance` does one piece of work of one of them, whichever `rng` says."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.thread = threading.get_ident()
        self._all = [EmulatedQueue(self) for _ in range(4)]
        self.queues = CopyQueues(*self._all)

    def advance(self) -> bool:
        """Return whether anything could be done."""
        return any(queue.advance() for queue in self._rng.sample(self._all, len(self._all)))


class AtOnce:
    """Implements `Queue` and `Mark`: nothing is ever left to do."""

    def put(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> Mark:
        return self

    def wait(self, mark: Mark | None = None) -> None:
        pass


class ArrayMovement:
    """Implements `Movement` between arrays whose rows are pages: `pool`, a buffer, and so many slots."""

    def __init__(self, pool: U64, num_buffered: int, num_slots: int) -> None:
        self._pool = pool
        self._buffer, self._host = (
            np.zeros((count, *pool.shape[1:]), np.uint64) for count in (num_buffered, num_slots)
        )

    def read(self, pages: I64, first: int) -> None:
        self._buffer[first : first + len(pages)] = self._pool[pages]

    def save(self, first: int, slots: I64) -> None:
        self._host[slots] = self._buffer[first : first + len(slots)]

    def restore(self, slots: I64, pages: I64) -> None:
        self._pool[pages] = self._host[slots]
