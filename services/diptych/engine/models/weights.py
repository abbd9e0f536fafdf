"""Reads a checkpoint into the matrices that the forward pass multiplies, each laid out as soon as it is complete.

A matrix is laid out as soon as its last piece is read, and its plain form dropped, so that no moment needs more memory
than the weights and one file. What is stored in few bits goes to `Ops` as it is. Unknown, missing and misshapen tensors
are errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.architectures.placement import Piece, Placed
from diptych.checkpoints.quantization.weight import Stored, merge, rows_of
from diptych.common.errors import ConfigError
from diptych.engine.models.dense import CPU, dense
from diptych.engine.models.matrix import Matrix
from diptych.engine.models.ops import Ops


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

    def beside(self, matrices: Mapping[str, Matrix]) -> Weights:
        """Return the same weights with `matrices` of another model."""
        return Weights({**self._matrices, **matrices}, self._vectors, self._norm_offset)

    def matrix(self, name: str) -> Matrix:
        return self._matrices[name]

    def vector(self, name: str) -> Tensor | None:
        """Return a bias; None when the model has none."""
        return self._vectors.get(name)

    def constant(self, name: str) -> Tensor:
        """Return a vector, or a stack of them, that the model has."""
        return self._vectors[name]

    def norm(self, name: str) -> Tensor:
        """Return a norm's weights. With an offset they are float32: it would cost a narrow type its precision."""
        weight = self._vectors[name]
        return weight.float() + self._norm_offset if self._norm_offset else weight


class _Target:
    """A matrix or vector that waits for its pieces."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.split = pieces[0].split
        self._waits_for = len(pieces)
        self._pieces: list[tuple[int, Stored]] = []  # where they start, and their rows

    def add(self, piece: Piece, rows: Stored) -> list[Stored] | None:
        """Keep `rows`; return all in order when these were the last."""
        self._pieces.append((piece.start, rows))
        self._waits_for -= 1
        return None if self._waits_for else [rows for _, rows in sorted(self._pieces, key=lambda each: each[0])]


def load(
    config: ModelConfig,
    placement: Iterable[Placed],
    tensors: Iterable[tuple[str, Stored]],
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> Weights:
    """Read `tensors` to where `placement` says, in memory of `device`."""
    places = dict(placement)
    targets = _targets(places)
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, Tensor] = {}
    for name, array in tensors:
        pieces = places.pop(name, None)
        if pieces is None:
            raise ConfigError(f"{config.model_id}: tensor {name!r} has no place in this model, or comes twice")
        for piece, rows in _cut(config, name, array, pieces):
            complete = targets[piece.target].add(piece, rows)
            if complete is None:
                continue
            del targets[piece.target]
            its_dtype = torch.float32 if piece.wide else dtype
            if len(piece.shape) != 2:  # convolutions have three
                vectors[piece.target] = dense(complete, its_dtype, device)
            else:
                weight = None if piece.wide else merge(complete)
                full = dense(complete, its_dtype, device) if weight is None else weight
                matrices[piece.target] = ops.matrix(piece.target, full, piece.split)
    if places:
        raise ConfigError(f"{config.model_id}: the checkpoint lacks {', '.join(sorted(places)[:5])}")
    if config.tie_embeddings:
        matrices["lm_head"] = matrices["embed"]
    return Weights(matrices, vectors, config.norm_offset)


def _targets(places: dict[str, tuple[Piece, ...]]) -> dict[str, _Target]:
    by_target: defaultdict[str, list[Piece]] = defaultdict(list)
    for pieces in places.values():
        for piece in pieces:
            by_target[piece.target].append(piece)
    return {name: _Target(pieces) for name, pieces in by_target.items()}


def _cut(config: ModelConfig, name: str, array: Stored, pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, Stored]]:
    """Yield each piece with its rows of the tensor."""
    expected = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
    if array.shape != expected:
        raise ConfigError(f"{config.model_id}: {name} is {array.shape}, the configuration says {expected}")
    row = 0
    for piece in pieces:
        inside = slice(row, row + piece.shape[0])
        yield piece, rows_of(array, inside)
        row += piece.shape[0]
