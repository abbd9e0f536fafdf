"""Copies stored tensors into one that torch computes with, some rows at a time: nothing large is in memory twice.

Two-byte floats are copied as they are: a GPU's weights then cross the bus once, at half the width of float32.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.checkpoints.quantization.weight import Stored, as_floats, as_quantized, rows_of
from diptych.kernels.quantized import QuantizedArray, repeats

CPU: Final = torch.device("cpu")
ROWS_AT_ONCE: Final = 256


def dense(pieces: Sequence[Stored], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Put `pieces` on top of each other, dequantised."""
    full = _allocate((sum(len(piece) for piece in pieces), *pieces[0].shape[1:]), dtype, device)
    if all(map(_repeats, pieces)):
        return _filled(full, pieces)
    row = 0
    for piece in pieces:
        for start in range(0, len(piece), ROWS_AT_ONCE):
            values = _values(rows_of(piece, slice(start, start + ROWS_AT_ONCE)))
            full[row : row + len(values)].copy_(values.to(device))  # so that a GPU rounds, not the host
            row += len(values)
    return full


def _repeats(piece: Stored) -> bool:
    if not isinstance(piece, QuantizedArray):
        return repeats(piece)
    return all(repeats(each) for each in (piece.codes, piece.scales, piece.mins) if each is not None)


def _filled(full: Tensor, pieces: Sequence[Stored]) -> Tensor:
    """Put pieces that are one number each into `full`: nothing is copied to a device."""
    row = 0
    for piece in pieces:
        full[row : row + len(piece)] = float(as_floats(rows_of(piece, slice(0, 1))).flat[0])
        row += len(piece)
    return full


def _values(piece: Stored) -> Tensor:
    """Return what is stored, in the narrowest type of torch that holds it."""
    array = as_quantized(piece)
    if array is not None and array.code == "bfloat16":
        return torch.from_numpy(array.codes.view(np.int16)).view(torch.bfloat16)
    if array is not None and array.code == "float16":
        return torch.from_numpy(array.codes)
    return torch.from_numpy(as_floats(piece))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory of `device`; on the CPU such that goes back to the system: malloc would keep much of it."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
