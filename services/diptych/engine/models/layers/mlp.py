"""The feed-forward network of a layer: gate and up together, activation, down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.models.arithmetic.ops import Gated, Ops
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import SUMMANDS, Found, Layout
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights
from diptych.engine.models.operations import Operation


class Steps(NamedTuple):
    """What a block computes of a step's tokens."""

    operations: Sequence[Operation]  # in this order, once
    found: Callable[[], Found]  # behind them


class FeedForward(Protocol):
    """What follows attention in a layer."""

    def reads(self, num_rows: int) -> Layout:
        """Return `SCATTERED` if of so many rows of `normed` it reads this rank's part alone; else `WHOLE`."""
        ...

    def steps(self, buffers: Buffers) -> Steps:
        """Return what makes `delta` of `normed`, which may be overwritten."""
        ...

    def serve_others(self, nothing: Tensor) -> Sequence[Operation]:
        """Return what ranks with tokens of their own need of us where we have none: `nothing` is `[0, hidden_size]`.

        It yields as often as `steps` does.
        """
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

    def reads(self, num_rows: int) -> Layout:
        return Layout.WHOLE

    def serve_others(self, nothing: Tensor) -> Sequence[Operation]:
        """Nothing: each scheduler has the whole network."""
        return ()

    def steps(self, buffers: Buffers) -> Steps:
        return Steps((partial(self.forward, buffers),), lambda: SUMMANDS)

    def forward(self, buffers: Buffers) -> None:
        """`normed` -> `delta`."""
        self.gated.forward(buffers.normed, buffers.gate_up, buffers.activated)
        self.down.multiply(buffers.activated, buffers.delta)
