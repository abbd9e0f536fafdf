"""Gemma 4's feed-forward network of a layer with experts: its one network and its experts, added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig, Moe
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.layer_communicator import WHOLE, Layout
from diptych.engine.models.layers.mlp import Mlp, Steps
from diptych.engine.models.layers.moe import Sending, SentExperts, new_experts, serve_others
from diptych.engine.models.layers.routing import route
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights
from diptych.engine.models.operations import Operation


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
    experts: SentExperts
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

    def reads(self, num_rows: int) -> Layout:
        return Layout.WHOLE

    def serve_others(self, nothing: Tensor) -> Sequence[Operation]:
        return serve_others(self.experts, self.moe, nothing)

    def steps(self, buffers: Buffers) -> Steps:
        """The two sums are normed apart, so both are made here. While results travel back, the network computes."""
        passing = _Passing(self, buffers, Sending(self.experts))
        return Steps(passing.sending.steps(passing.send, passing.compute_dense, passing.add), lambda: WHOLE)


@dataclass(slots=True, eq=False)
class _Passing:
    """What a step's tokens have come to in a `DenseBesideMoe`."""

    block: DenseBesideMoe
    buffers: Buffers
    sending: Sending
    of_experts: Tensor = field(init=False)

    def send(self) -> None:
        """`normed` is as it was without weights."""
        block, x = self.block, self.buffers.normed
        logits, self.of_experts = x.new_empty(len(x), block.moe.num_experts), torch.empty_like(x)
        block.router.multiply((x * block.router_scale).to(x.dtype), logits)
        chosen, shares = route(logits, block.moe, None)
        counted = (shares * block.expert_scales[chosen]).to(x.dtype)
        self.sending.begin((x * block.experts_norm).to(x.dtype), chosen, counted, self.of_experts)

    def compute_dense(self) -> None:
        self.buffers.normed.mul_(self.block.dense_norm)
        self.block.dense.forward(self.buffers)
        self._norm_sum(self.buffers.delta, self.block.dense_post_norm)

    def add(self) -> None:
        self._norm_sum(self.of_experts, self.block.experts_post_norm)
        self.buffers.delta.add_(self.of_experts)

    def _norm_sum(self, x: Tensor, weight: Tensor) -> None:
        self.block.ops.ranks.all_reduce(x)
        self.block.ops.rms_norm(x, weight, self.block.eps, x)
