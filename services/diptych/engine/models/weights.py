"""Reads a checkpoint into the matrices that the forward pass multiplies, each laid out as soon as it is complete.

A tensor is copied to its rows as it is read, and a matrix's plain form is dropped when it is laid out, so that no
moment needs more memory than the weights and one file. Unknown, missing and misshapen tensors are errors.
"""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.engine.loader.config import ModelConfig
from diptych.engine.loader.gguf import Array
from diptych.engine.models.ops import Matrix, Ops
from diptych.engine.models.placement import Piece, Placed


class Weights:
    """A model's weights by target name, while its layers are built."""

    def __init__(self, matrices: dict[str, Matrix], vectors: dict[str, Tensor], norm_offset: float) -> None:
        self._matrices = matrices
        self._vectors = vectors
        self._norm_offset = norm_offset

    def wrapped(self, wrap: Callable[[str, Matrix], Matrix]) -> Weights:
        """Return the same weights with what `wrap` makes of each matrix."""
        matrices = {name: wrap(name, matrix) for name, matrix in self._matrices.items()}
        return Weights(matrices, self._vectors, self._norm_offset)

    def matrix(self, name: str) -> Matrix:
        return self._matrices[name]

    def vector(self, name: str) -> Tensor | None:
        """Return a bias; None when the model has none."""
        return self._vectors.get(name)

    def norm(self, name: str) -> Tensor:
        """Return a norm's weights. With an offset they are float32: it would cost a narrow type its precision."""
        weight = self._vectors[name]
        return weight.float() + self._norm_offset if self._norm_offset else weight


class _Target:
    """A matrix or vector that fills up."""

    def __init__(self, pieces: list[Piece]) -> None:
        rows = max(piece.start + piece.shape[0] for piece in pieces)
        self.shape = (rows, *pieces[0].shape[1:])
        self.split = pieces[0].split
        self._waits_for = len(pieces)
        self._tensor: Tensor | None = None

    def put(self, piece: Piece, rows: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Copy `rows` to their place; return the whole when this was the last piece."""
        if self._tensor is None:
            self._tensor = _allocate(self.shape, dtype)
        self._tensor[piece.start : piece.start + piece.shape[0]].copy_(rows)
        self._waits_for -= 1
        return None if self._waits_for else self._tensor


def load(
    config: ModelConfig,
    placement: Iterable[Placed],
    tensors: Iterable[tuple[str, Array]],
    ops: Ops,
    dtype: torch.dtype,
) -> Weights:
    """Read `tensors` to where `placement` says."""
    places = dict(placement)
    targets = _targets(places)
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, Tensor] = {}
    for name, array in tensors:
        pieces = places.pop(name, None)
        if pieces is None:
            raise ConfigError(f"{config.model_id}: tensor {name!r} has no place in this model, or comes twice")
        for piece, rows in _cut(config, name, array, pieces):
            full = targets[piece.target].put(piece, rows, dtype)
            if full is None:
                continue
            del targets[piece.target]
            if full.dim() == 1:
                vectors[piece.target] = full
            else:
                matrices[piece.target] = ops.matrix(piece.target, full, piece.split)
    if places:
        raise ConfigError(f"{config.model_id}: the checkpoint lacks {', '.join(sorted(places)[:5])}")
    return Weights(matrices, vectors, config.norm_offset)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory that goes back to the system when it is dropped; malloc would keep much of it."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _targets(places: dict[str, tuple[Piece, ...]]) -> dict[str, _Target]:
    by_target: defaultdict[str, list[Piece]] = defaultdict(list)
    for pieces in places.values():
        for piece in pieces:
            by_target[piece.target].append(piece)
    return {name: _Target(pieces) for name, pieces in by_target.items()}


def _cut(config: ModelConfig, name: str, array: Array, pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, Tensor]]:
    """Yield each piece with its rows of the tensor."""
    expected = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
    if array.shape != expected:
        raise ConfigError(f"{config.model_id}: {name} is {array.shape}, the configuration says {expected}")
    tensor, row = _tensor(array), 0
    for piece in pieces:
        yield piece, tensor[row : row + piece.shape[0]]
        row += piece.shape[0]


def _tensor(array: Array) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
