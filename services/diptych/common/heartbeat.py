"""When a loop last came round, kept where another thread or process can see it without asking.

Rule: whoever beats never waits. Hence memory without a file behind it: a store into a mapped file may wait for the
disk. Both sides use the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Final

BEAT_S: Final = 0.5  # a loop that has nothing to do beats so often


class SharedHeartbeat:
    """A loop's heartbeat in shared memory; each process maps the same descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._moment = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("d")

    def beat(self, now_s: float) -> None:
        self._moment[0] = now_s

    @property
    def last_s(self) -> float | None:
        """When the loop last came round; None: it has not begun."""
        return self._moment[0] or None


@contextlib.contextmanager
def new_heartbeat() -> Iterator[tuple[SharedHeartbeat, int]]:
    """Yield a heartbeat and the descriptor for the other process to inherit, which is closed at the exit."""
    if sys.platform.startswith("linux"):
        descriptor = os.memfd_create("diptych-heartbeat")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        yield SharedHeartbeat(descriptor), descriptor
    finally:
        os.close(descriptor)


class LoopHeartbeat:
    """The heartbeat of an asyncio loop, on which `run` must be running."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.last_s = clock()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self.last_s = self._clock()
            await asyncio.sleep(BEAT_S)
