"""Keeps the time when a loop last came round where another process can read it without asking.

Rule: the writer of a beat never waits. Hence memory without a file behind it (`shared_memory`). Both sides use the
monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Final

from diptych.common.shared_memory import SharedMemory

BEAT_S: Final = 0.5  # a loop that has nothing to do beats so often
NO_BEAT: Final = 0.0  # what the memory holds before the first beat, and after the last
DESCRIPTOR_VARIABLE: Final = "DIPTYCH_HEARTBEAT_FD"  # set by a supervisor that looks at the beats of this process


class SharedHeartbeat:
    """A loop's heartbeat in shared memory; each process maps the same descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._moment = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("d")

    def beat(self, now_s: float) -> None:
        self._moment[0] = now_s

    @property
    def last_s(self) -> float | None:
        """When the loop last came round; None: it has not begun, or has said that it ends."""
        return None if self._moment[0] == NO_BEAT else self._moment[0]


@contextlib.contextmanager
def new_heartbeat() -> Iterator[tuple[SharedHeartbeat, int]]:
    """Yield a heartbeat and the descriptor for the other process to inherit, which is closed at the exit."""
    with contextlib.closing(SharedMemory("diptych-heartbeat", mmap.PAGESIZE)) as memory:
        yield SharedHeartbeat(memory.descriptor), memory.descriptor
