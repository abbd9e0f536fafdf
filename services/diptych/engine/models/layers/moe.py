"""A mixture of experts: a router chooses a few networks for each token, and shares for what they return."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig, Moe
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.matrix import Matrix
from diptych.engine.models.ops import Experts, Ops, activate_of
from diptych.engine.models.weights import Weights


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """`FeedForward` by experts."""

    ops: Ops
    router: Matrix
    experts: Experts
    moe: Moe

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> MoeBlock:
        assert config.moe is not None
        names = [f"{layer}.experts.{i}" for i in range(config.moe.num_experts)]
        gate_up, down = ([weights.matrix(f"{name}.{part}") for name in names] for part in ("gate_up", "down"))
        experts = ops.experts(gate_up, down, config.moe.ffn_size, activate_of(ops, config.activation))
        return MoeBlock(ops, weights.matrix(f"{layer}.router"), experts, config.moe)

    def forward(self, buffers: Buffers) -> None:
        chosen, shares = self._route(buffers.normed)
        self.experts.forward(buffers.normed, chosen, shares, buffers.delta)
        self.ops.all_reduce(buffers.delta)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return experts and their shares, `[num_tokens, experts_per_token]`."""
        scores = x.new_empty(len(x), self.moe.num_experts)
        self.router.multiply(x, scores)
        shares, chosen = scores.softmax(dim=-1, dtype=torch.float32).topk(self.moe.experts_per_token, dim=-1)
        if self.moe.normalize:
            shares /= shares.sum(dim=-1, keepdim=True)
        return chosen, shares.to(x.dtype)
