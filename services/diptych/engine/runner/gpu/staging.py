"""Brings a step's arrays to the device: packed into one pinned buffer, one asynchronous copy.

Rule: a pinned buffer is written only when the copy that read it last is over. There are two, so that the host fills one
while the other is read. On the device there is one: what reads it and the copy that overwrites it are queued on one
stream. An array's place follows from the sizes of those before it, so equal sizes give equal addresses: that is what a
captured graph relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.engine.runner.gpu.bus import Bus, CopyEngines

ALIGNMENT: Final = 16  # bytes: the widest access of one thread
NUM_BUFFERS: Final = 2

Array = npt.NDArray[Any]


class Event(Protocol):
    """A mark on the device's current stream, as `torch.cuda.Event` is."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Wait until the device has come to the mark; at once if it was never recorded."""
        ...


class Staging:
    """One way in. One thread at a time may use it, always on the same stream."""

    def __init__(
        self, capacity_nbytes: int, device: torch.device, new_event: Callable[[], Event], bus: Bus | None = None
    ) -> None:
        self._bus = bus or CopyEngines()
        self._device_buffer = torch.empty(capacity_nbytes, dtype=torch.uint8, device=device)
        is_pinned = device.type == "cuda"
        self._buffers = [
            (torch.empty(capacity_nbytes, dtype=torch.uint8, pin_memory=is_pinned), new_event())
            for _ in range(NUM_BUFFERS)
        ]
        self._turn = 0

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return the arrays on the device, good until the next upload. Does not wait for the copy."""
        offsets, nbytes = place([array.nbytes for array in arrays])
        assert nbytes <= len(self._device_buffer), f"{nbytes} bytes do not fit {len(self._device_buffer)}"
        pinned, is_read = self._buffers[self._turn]
        self._turn = (self._turn + 1) % NUM_BUFFERS
        is_read.synchronize()
        pack(pinned.numpy(), arrays, offsets)
        self._bus.copy(self._device_buffer[:nbytes], pinned[:nbytes])
        is_read.record()
        return [self._view(array, offset) for array, offset in zip(arrays, offsets, strict=True)]

    def _view(self, array: Array, offset: int) -> Tensor:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        return self._device_buffer[offset : offset + array.nbytes].view(dtype).view(array.shape)


def place(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each piece of so many bytes goes, and where the last ends."""
    offsets, end = [], 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + size
    return offsets, end


def pack(buffer: npt.NDArray[np.uint8], arrays: Sequence[Array], offsets: Sequence[int]) -> None:
    """Copy each array to its offset in `buffer`."""
    for array, offset in zip(arrays, offsets, strict=True):
        buffer[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
