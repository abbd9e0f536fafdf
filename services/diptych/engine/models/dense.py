"""Copies stored tensors into one that torch computes with, some rows at a time: nothing large is in memory twice."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from diptych.engine.quantization.weight import Stored, as_floats, rows_of

ROWS_AT_ONCE: Final = 256


def dense(pieces: Sequence[Stored], dtype: torch.dtype) -> Tensor:
    """Put `pieces` on top of each other, dequantised."""
    full = _allocate((sum(len(piece) for piece in pieces), *pieces[0].shape[1:]), dtype)
    row = 0
    for piece in pieces:
        for start in range(0, len(piece), ROWS_AT_ONCE):
            values = as_floats(rows_of(piece, slice(start, start + ROWS_AT_ONCE)))
            full[row : row + len(values)].copy_(torch.from_numpy(values))
            row += len(values)
    return full


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory that goes back to the system when it is dropped; malloc would keep much of it."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
