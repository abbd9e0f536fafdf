"""Counts what a model has and what a token of it meets, from its configuration alone: no weight is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from diptych.architectures.placement import Piece
from diptych.architectures.registry import placement_of

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig

MatrixNbytes = Callable[[str, Piece], int]  # of a matrix, or a part of it, of the tensor with a name
EXPERT: Final = re.compile(r"\d+\.experts\.")  # how the target of an expert's matrix begins
NETWORK: Final = re.compile(r"\d+\.(gate_up|down)")  # the targets of a layer's one feed-forward network
LINEAR: Final = re.compile(  # what FP8 is for
    r"\d+\.(qkv|q|q_a|q_b|kv_a|o|((shared|experts\.\d+)\.)?(gate_up|down))"
)


def num_parameters(config: ModelConfig) -> int:
    """Return the numbers in all tensors that are read."""
    return sum(_by_kind(config))


def num_active_parameters(config: ModelConfig) -> int:
    """Return the numbers that one token meets: of the experts those that are chosen for it."""
    experts, others = _by_kind(config)
    moe = config.moe
    return others if moe is None else others + experts * moe.experts_per_token // moe.num_experts


def weights_nbytes(
    config: ModelConfig,
    number_nbytes: int,
    of_matrix: MatrixNbytes,
    has: Callable[[str], bool] = lambda target: True,
) -> int:
    """Return the bytes of all weights whose targets `has` knows, of which matrices take what `of_matrix` says."""
    total = 0
    for name, pieces in placement_of(config):
        for piece in filter(lambda piece: has(piece.target), pieces):
            is_matrix = len(piece.shape) == 2
            total += of_matrix(name, piece) if is_matrix else math.prod(piece.shape) * number_nbytes
    return total


def _by_kind(config: ModelConfig) -> tuple[int, int]:
    """Return the numbers in experts that are chosen from, and in all else."""
    counts = [0, 0]
    for _, pieces in placement_of(config):
        for piece in pieces:
            counts[EXPERT.match(piece.target) is None] += math.prod(piece.shape)
    return counts[0], counts[1]
