"""The feed-forward network of a layer: gate and up together, activation, down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.models.arithmetic.ops import Gated, Ops
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import SUMMANDS, Found
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights


class FeedForward(Protocol):
    """What follows attention in a layer."""

    def forward(self, buffers: Buffers) -> Found:
        """`normed`, which may be overwritten, -> `delta`."""
        ...

    def serve_others(self, nothing: Tensor) -> None:
        """Do what ranks with tokens of their own need of us where we have none: `nothing` is `[0, hidden_size]`."""
        ...


@dataclass(frozen=True, slots=True)
class Mlp:
    """One network for all tokens."""

    ops: Ops
    gated: Gated
    down: Matrix

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> Mlp:
        gated = ops.gated(weights.matrix(f"{layer}.gate_up"), config.activation)
        return Mlp(ops, gated, weights.matrix(f"{layer}.down"))

    def serve_others(self, nothing: Tensor) -> None:
        """Nobody does: each scheduler has the whole network."""

    def forward(self, buffers: Buffers) -> Found:
        self.gated.forward(buffers.normed, buffers.gate_up, buffers.activated)
        self.down.multiply(buffers.activated, buffers.delta)
        return SUMMANDS
