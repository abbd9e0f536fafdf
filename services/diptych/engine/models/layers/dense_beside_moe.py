"""Gemma 4's feed-forward network of a layer with experts: its one network and its experts, added up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig, Moe
from diptych.engine.models.arithmetic.ops import Experts, Ops
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import WHOLE, Found
from diptych.engine.models.layers.mlp import Mlp
from diptych.engine.models.layers.moe import new_experts, serve_others
from diptych.engine.models.layers.routing import route
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights


@dataclass(frozen=True, slots=True)
class DenseBesideMoe:
    """`FeedForward` of what is normed without weights: each part, and the router, has its own."""

    ops: Ops
    dense: Mlp
    dense_norm: Tensor
    dense_post_norm: Tensor
    router: Matrix
    router_scale: Tensor  # [hidden_size]
    expert_scales: Tensor  # [num_experts]: of shares
    experts: Experts
    experts_norm: Tensor
    experts_post_norm: Tensor
    moe: Moe
    eps: float

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> DenseBesideMoe:
        assert config.moe is not None
        return DenseBesideMoe(
            ops=ops,
            dense=Mlp.build(config, weights, ops, layer),
            dense_norm=weights.norm(f"{layer}.dense_norm"),
            dense_post_norm=weights.norm(f"{layer}.dense_post_norm"),
            router=weights.matrix(f"{layer}.router"),
            router_scale=weights.norm(f"{layer}.router_scale") * config.hidden_size**-0.5,
            expert_scales=weights.norm(f"{layer}.expert_scales"),
            experts=new_experts(config, config.moe, weights, ops, layer),
            experts_norm=weights.norm(f"{layer}.experts_norm"),
            experts_post_norm=weights.norm(f"{layer}.experts_post_norm"),
            moe=config.moe,
            eps=config.rms_norm_eps,
        )

    def serve_others(self, nothing: Tensor) -> None:
        serve_others(self.experts, self.moe, nothing)

    def forward(self, buffers: Buffers) -> Found:
        """The two sums are normed apart, so both are made here."""
        of_experts = self._of_experts(buffers.normed)
        buffers.normed.mul_(self.dense_norm)
        self.dense.forward(buffers)
        self.ops.ranks.all_reduce(buffers.delta)
        self.ops.rms_norm(buffers.delta, self.dense_post_norm, self.eps, buffers.delta)
        buffers.delta.add_(of_experts)
        return WHOLE

    def _of_experts(self, x: Tensor) -> Tensor:
        """Return what a token's experts make of `x`, `[num_tokens, hidden_size]`, normed."""
        logits, out = x.new_empty(len(x), self.moe.num_experts), torch.empty_like(x)
        self.router.multiply((x * self.router_scale).to(x.dtype), logits)
        chosen, shares = route(logits, self.moe, None)
        counted = (shares * self.expert_scales[chosen]).to(x.dtype)
        self.experts.forward((x * self.experts_norm).to(x.dtype), chosen, counted, out)
        self.ops.ranks.all_reduce(out)
        self.ops.rms_norm(out, self.experts_post_norm, self.eps, out)
        return out
