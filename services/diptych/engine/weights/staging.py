"""Brings pieces of a model's memory to host memory and back: as they lie on a CPU, by a pinned buffer on a GPU.

On a GPU copies have a stream of their own, and steps do not wait for them.
"""

from __future__ import annotations

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


def new_staging(device: torch.device) -> Staging:
    return GpuStaging(device) if device.type == "cuda" else HostStaging()
