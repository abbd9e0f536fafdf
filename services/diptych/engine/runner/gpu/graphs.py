"""Decode steps as CUDA graphs, one a batch size: hundreds of launches become one.

A graph is captured when its size is first needed, by `warm_up.py` as a rule, and reads the same addresses in every
replay. All share one pool of memory, for they are replayed one after the other on one stream; what one returns is good
until the next replay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MIB: Final = 2**20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Captured(Generic[T]):
    """Work that can be queued again by one call."""

    replay: Callable[[], None]
    output: T


class Capture(Protocol):
    """Records work."""

    def capture(self, work: Callable[[], T]) -> Captured[T]:
        """Record `work`: it queues kernels on the current stream and returns what they will have computed.

        It is run at least once meanwhile.
        """
        ...

    def used_nbytes(self) -> int:
        """Return how much of the device's memory is taken, by anybody, beside what torch only keeps."""
        ...


class Graphs:
    """The captured steps of one model on one KV pool."""

    def __init__(self, rungs: Sequence[int], capture: Capture, what: str = "the decode step") -> None:
        """`what` is captured, for the log."""
        self.rungs = rungs  # sizes that there may be graphs of, ascending
        self._what = what
        self._capture = capture
        self._captured: dict[int, Captured[Tensor]] = {}
        self.nbytes = 0  # taken while they were captured

    def __len__(self) -> int:
        """How many are captured."""
        return len(self._captured)

    def __contains__(self, rung: int) -> bool:
        return rung in self._captured

    def capture(self, rung: int, work: Callable[[], Tensor]) -> None:
        """Capture `work` of that size; it runs at least once meanwhile."""
        began_s, used = time.monotonic(), self._capture.used_nbytes()
        self._captured[rung] = self._capture.capture(work)
        nbytes = max(0, self._capture.used_nbytes() - used)
        self.nbytes += nbytes
        words = "captured %s of %d rows in %.2f s; it takes %.0f MiB, all %d graphs %.0f MiB"
        took_s = time.monotonic() - began_s
        logger.info(words, self._what, rung, took_s, nbytes / MIB, len(self._captured), self.nbytes / MIB)

    def replay(self, rung: int) -> Tensor:
        """Queue the captured work of that size; return its output."""
        captured = self._captured[rung]
        captured.replay()
        return captured.output


class CudaCapture:
    """Implements `Capture` on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], T]) -> Captured[T]:
        """Run `work` once, so that its kernels are compiled and its libraries set up; then record it.

        Other threads go on to use the device meanwhile: the transfer engine's, NCCL's.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = work()
        return Captured(graph.replay, output)

    def used_nbytes(self) -> int:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)
