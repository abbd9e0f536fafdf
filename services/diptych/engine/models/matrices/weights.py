"""Reads a checkpoint into the matrices that the forward pass multiplies, each laid out as soon as it is complete.

A matrix is laid out as soon as its last piece is read, and its plain form dropped, so that no moment needs more memory
than the weights and one file. What is stored in few bits goes to `Ops` as it is. Unknown, missing and misshapen tensors
are errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.architectures.placement import Piece, Placed
from diptych.checkpoints.quantization.weight import Stored, merge, rows_of
from diptych.common.errors import ConfigError
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.matrices.dense import CPU, dense
from diptych.engine.models.matrices.matrix import Matrix


class Weights:
    """A model's weights by target name, while its layers are built."""

    def __init__(self, matrices: dict[str, Matrix], vectors: dict[str, Tensor], norm_offset: float) -> None:
        self._matrices = matrices
        self._vectors = vectors
        self._norm_offset = norm_offset

    @property
    def device(self) -> torch.device:
        return next(iter(self._vectors.values())).device

    def put(self, name: str, weight: Matrix | Tensor) -> None:
        """Add a weight, or replace it."""
        if isinstance(weight, Tensor):
            self._vectors[name] = weight
        else:
            self._matrices[name] = weight

    def vectors(self) -> dict[str, Tensor]:
        """Return all that is no matrix."""
        return dict(self._vectors)

    def noted(self) -> NotedWeights:
        """Return the same weights, which note what they are asked for."""
        return NotedWeights(self._matrices, self._vectors, self._norm_offset)

    def wrapped(self, wrap: Callable[[str, Matrix], Matrix]) -> Weights:
        """Return the same weights with what `wrap` makes of each matrix."""
        matrices = {name: wrap(name, matrix) for name, matrix in self._matrices.items()}
        return Weights(matrices, self._vectors, self._norm_offset)

    def beside(self, matrices: Mapping[str, Matrix]) -> Weights:
        """Return the same weights with `matrices` of another model."""
        return Weights({**self._matrices, **matrices}, self._vectors, self._norm_offset)

    def has(self, name: str) -> bool:
        return name in self._matrices

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


class NotedWeights(Weights):
    """Weights that know what they were asked for: what a part of a model is made of."""

    def __init__(self, matrices: dict[str, Matrix], vectors: dict[str, Tensor], norm_offset: float) -> None:
        super().__init__(matrices, vectors, norm_offset)
        self.names: set[str] = set()

    def matrix(self, name: str) -> Matrix:
        self.names.add(name)
        return super().matrix(name)

    def vector(self, name: str) -> Tensor | None:
        found = super().vector(name)
        if found is not None:
            self.names.add(name)
        return found

    def constant(self, name: str) -> Tensor:
        self.names.add(name)
        return super().constant(name)

    def norm(self, name: str) -> Tensor:
        self.names.add(name)
        return super().norm(name)


class _Target:
    """A matrix or vector that waits for its pieces."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.split = pieces[0].split
        self._num_pieces = self._waits_for = len(pieces)
        self._pieces: list[tuple[int, Stored]] = []  # where they start, and their rows

    @property
    def is_begun(self) -> bool:
        """Whether some of its pieces have come."""
        return self._waits_for < self._num_pieces

    def add(self, piece: Piece, rows: Stored) -> list[Stored] | None:
        """Keep `rows`; return all in order when these were the last."""
        self._pieces.append((piece.start, rows))
        self._waits_for -= 1
        return None if self._waits_for else [rows for _, rows in sorted(self._pieces, key=lambda each: each[0])]


class Assembly:
    """Puts the tensors of a checkpoint together, whatever order they come in."""

    def __init__(
        self,
        config: ModelConfig,
        placement: Iterable[Placed],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        self._config = config
        self._places = dict(placement)  # of the tensors that have not come
        self._targets = _targets(self._places)
        self._ops = ops
        self._dtype = dtype
        self._device = device

    @property
    def lacking(self) -> list[str]:
        """The tensors that have not come, in the order of their names."""
        return sorted(self._places)

    @property
    def begun(self) -> set[str]:
        """The matrices and vectors of which some pieces have come, and not all."""
        return {name for name, target in self._targets.items() if target.is_begun}

    def targets_of(self, tensor: str) -> list[str]:
        """Return the matrices and vectors of which a tensor that has not come has pieces."""
        return [piece.target for piece in self._places.get(tensor, ())]

    def tensors_of(self, targets: Collection[str]) -> list[str]:
        """Return the tensors that have not come and are pieces of `targets`, in the order of their names."""
        return [name for name in self.lacking if any(piece.target in targets for piece in self._places[name])]

    def add(self, name: str, array: Stored) -> Iterator[tuple[str, Matrix | Tensor]]:
        """Take a tensor; yield the matrices and vectors that are complete with it. Raises `ConfigError`."""
        pieces = self._places.pop(name, None)
        if pieces is None:
            raise ConfigError(f"{self._config.model_id}: tensor {name!r} has no place in this model, or comes twice")
        for piece, rows in _cut(self._config, name, array, pieces):
            complete = self._targets[piece.target].add(piece, rows)
            if complete is not None:
                del self._targets[piece.target]
                yield piece.target, self._laid_out(piece, complete)

    def _laid_out(self, piece: Piece, complete: list[Stored]) -> Matrix | Tensor:
        its_dtype = torch.float32 if piece.wide else self._dtype
        if len(piece.shape) != 2:  # convolutions have three
            return dense(complete, its_dtype, self._device)
        weight = None if piece.wide else merge(complete)
        full = dense(complete, its_dtype, self._device) if weight is None else weight
        return self._ops.matrix(piece.target, full, piece.split)


def load(
    config: ModelConfig,
    placement: Iterable[Placed],
    tensors: Iterable[tuple[str, Stored]],
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> Weights:
    """Read `tensors` to where `placement` says, in memory of `device`."""
    assembly, weights = Assembly(config, placement, ops, dtype, device), Weights({}, {}, config.norm_offset)
    for name, array in tensors:
        for target, found in assembly.add(name, array):
            weights.put(target, found)
    if assembly.lacking:
        raise ConfigError(f"{config.model_id}: the checkpoint lacks {', '.join(assembly.lacking[:5])}")
    if config.tie_embeddings:
        weights.put("lm_head", weights.matrix("embed"))
    return weights


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
