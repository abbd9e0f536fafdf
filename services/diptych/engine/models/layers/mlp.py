"""The feed-forward network of a layer: gate and up together, activation, down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from diptych.engine.loader.config import Activation, ModelConfig
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.ops import Activate, Matrix, Ops
from diptych.engine.models.weights import Weights


class FeedForward(Protocol):
    """What follows attention in a layer."""

    def forward(self, buffers: Buffers) -> None:
        """`normed` -> `delta`."""
        ...


@dataclass(frozen=True, slots=True)
class Mlp:
    """One network for all tokens."""

    ops: Ops
    gate_up: Matrix
    activate: Activate
    down: Matrix

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> Mlp:
        gate_up, down = weights.matrix(f"{layer}.gate_up"), weights.matrix(f"{layer}.down")
        return Mlp(ops, gate_up, activation(ops, config.activation), down)

    def forward(self, buffers: Buffers) -> None:
        self.gate_up.multiply(buffers.normed, buffers.gate_up)
        self.activate(buffers.gate_up, buffers.activated)
        self.down.multiply(buffers.activated, buffers.delta)
        self.ops.all_reduce(buffers.delta)


def activation(ops: Ops, name: Activation) -> Activate:
    """Return the function called `name`."""
    return {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_tanh_and_mul}[name]
