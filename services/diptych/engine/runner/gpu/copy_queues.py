"""What a GPU does in order: queues of work, and marks in them that other queues and the host wait for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

FIRST: Final = -1  # a queue whose kernels go before those of steps; streams have 0 unless told so


class Mark(Protocol):
    """A place in a queue."""

    def wait(self) -> None:
        """Wait, in the calling thread, until the device has come there."""
        ...


class Queue(Protocol):
    """Work that a device does one after the other. What is in two queues keeps no order but that of marks."""

    def put(self, work: Callable[[], None]) -> None:
        """Queue what `work` launches."""
        ...

    def mark(self) -> Mark:
        """Return the place behind all that is queued."""
        ...

    def wait(self, mark: Mark) -> None:
        """Have what is queued from now on wait for the mark, on the device."""
        ...


@dataclass(frozen=True, slots=True)
class CopyQueues:
    """The queues of a GPU that copies pages beside its steps."""

    steps: Queue
    reads: Queue  # of evicted pages, out of the pool; may be `steps`
    saves: Queue  # to host memory
    restores: Queue  # and back


class StreamMark:
    """Implements `Mark`."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(blocking=True)  # who waits for a copy leaves the processor to others
        self.event.record()

    def wait(self) -> None:
        with torch.cuda.device(self.event.device):  # in a thread that is new, another GPU is current
            self.event.synchronize()

    @property
    def is_over(self) -> bool:
        return bool(self.event.query())


class StreamQueue:
    """Implements `Queue` by a stream of torch."""

    def __init__(self, stream: Callable[[], torch.cuda.Stream]) -> None:
        """`stream` is asked at each call: steps are queued on the one that is current then."""
        self._stream = stream

    def put(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream()):
            work()

    def mark(self) -> Mark:
        with torch.cuda.stream(self._stream()):
            return StreamMark()

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, StreamMark), mark
        self._stream().wait_event(mark.event)


def stream_queues(device: torch.device, *, rank: int) -> CopyQueues:
    """Return the queues of a rank's GPU.

    Rank 0's host knows that the steps are over that touched an evicted or a free page, so it may be read, or restored
    to, before the step that runs has ended. Other ranks are told of no step's end; there reads queue up behind the
    steps, and restores wait for the reads.
    """
    steps = StreamQueue(lambda: torch.cuda.current_stream(device))
    own = [torch.cuda.Stream(device, priority=priority) for priority in (FIRST, 0, 0)]
    reads, saves, restores = (StreamQueue(lambda stream=stream: stream) for stream in own)  # type: ignore[misc]
    return CopyQueues(steps, steps if rank else reads, saves, restores)
