"""A matrix as its checkpoint stores it, before it is laid out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diptych.kernels.quantized import Array, QuantizedArray, stack

Stored = Array | QuantizedArray  # a tensor of a checkpoint; uint16 holds bfloat16 bits


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Arrays of equal width on top of each other; neighbours differ in format."""

    parts: tuple[QuantizedArray, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dequantize(self) -> npt.NDArray[np.float32]:
        return np.concatenate([part.dequantize() for part in self.parts])


def merge(pieces: Sequence[Stored]) -> QuantizedWeight | None:
    """Put matrices on top of each other as they are stored; None if one of them is not in fewer than 32 bits."""
    arrays = [as_quantized(piece) for piece in pieces]
    found = [array for array in arrays if array is not None]
    if len(found) < len(arrays):
        return None
    groups = itertools.groupby(found, lambda array: array.format)
    return QuantizedWeight(tuple(stack(list(group)) for _, group in groups))


def as_quantized(piece: Stored) -> QuantizedArray | None:
    """See a matrix of two-byte floats as codes without scales."""
    if isinstance(piece, QuantizedArray):
        return piece
    if piece.ndim == 2 and piece.dtype == np.float16:
        return QuantizedArray("float16", piece)
    if piece.ndim == 2 and piece.dtype == np.uint16:
        return QuantizedArray("bfloat16", piece)
    return None


def rows_of(tensor: Stored, rows: slice) -> Stored:
    """Return some rows, without a copy."""
    return tensor.rows(rows) if isinstance(tensor, QuantizedArray) else tensor[rows]


def as_floats(tensor: Stored) -> npt.NDArray[np.float32]:
    if isinstance(tensor, QuantizedArray):
        return tensor.dequantize()
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32, copy=False)


def expanded(tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Array]]:
    """Yield every tensor in float32."""
    for name, tensor in tensors:
        yield name, as_floats(tensor)


def without_scales(tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """Yield in float32 what has scales, so that columns may be parted anywhere."""
    for name, tensor in tensors:
        has_scales = isinstance(tensor, QuantizedArray) and tensor.scales is not None
        yield name, as_floats(tensor) if has_scales else tensor
