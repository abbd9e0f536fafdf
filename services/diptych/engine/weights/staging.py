"""Brings pieces of a model's memory to host memory and back: as they lie on a CPU, by a pinned buffer on a GPU.

On a GPU copies have a stream of their own, and steps do not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from diptych.engine.weights.wire import PIECE_NBYTES, Piece


class Staging(Protocol):
    """One thread at a time may use it."""

    def out(self, part: Tensor, piece: Piece) -> memoryview:
        """Return the bytes of a piece, until the next call."""
        ...

    def place(self, part: Tensor, piece: Piece) -> memoryview:
        """Return memory for the bytes of a piece, to be filled before `settle`."""
        ...

    def settle(self, part: Tensor, piece: Piece) -> None:
        """What was put into the last place is right: let the model have it."""
        ...


class HostStaging:
    """The memory itself."""

    def out(self, part: Tensor, piece: Piece) -> memoryview:
        return part[piece.begin : piece.end].numpy().data.cast("B")

    place = out

    def settle(self, part: Tensor, piece: Piece) -> None:
        """It is there."""


class GpuStaging:
    """A pinned buffer for one piece."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(PIECE_NBYTES, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(device)

    def out(self, part: Tensor, piece: Piece) -> memoryview:
        staged = self._buffer[: piece.end - piece.begin]
        with torch.cuda.stream(self._stream):
            staged.copy_(part[piece.begin : piece.end], non_blocking=True)
        self._stream.synchronize()
        return staged.numpy().data.cast("B")

    def place(self, part: Tensor, piece: Piece) -> memoryview:
        return self._buffer[: piece.end - piece.begin].numpy().data.cast("B")

    def settle(self, part: Tensor, piece: Piece) -> None:
        with torch.cuda.stream(self._stream):
            part[piece.begin : piece.end].copy_(self._buffer[: piece.end - piece.begin], non_blocking=True)
        self._stream.synchronize()  # the buffer is filled again


class MixedStaging:
    """Either of them, by where a part lies: a GPU's model has a few numbers on the host."""

    def __init__(self, device: torch.device) -> None:
        self._host, self._gpu = HostStaging(), GpuStaging(device)

    def out(self, part: Tensor, piece: Piece) -> memoryview:
        return self._of(part).out(part, piece)

    def place(self, part: Tensor, piece: Piece) -> memoryview:
        return self._of(part).place(part, piece)

    def settle(self, part: Tensor, piece: Piece) -> None:
        self._of(part).settle(part, piece)

    def _of(self, part: Tensor) -> Staging:
        return self._gpu if part.is_cuda else self._host


def new_staging(parts: Iterable[Tensor]) -> Staging:
    """Return what brings these out and in."""
    on_gpu = next((part.device for part in parts if part.is_cuda), None)
    return HostStaging() if on_gpu is None else MixedStaging(on_gpu)
