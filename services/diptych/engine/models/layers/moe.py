"""A mixture of experts: a router chooses a few networks for each token.

Tokens are sorted by expert, so that each expert's matrices are read once for all of its tokens. What experts return is
added up in the order of their numbers, whatever the batch: a token's result does not depend on the other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.engine.loader.config import ModelConfig, Moe
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.layers.mlp import Activate, activation
from diptych.engine.models.ops import Matrix, Ops
from diptych.engine.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Expert:
    """One network."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """`FeedForward` by experts."""

    ops: Ops
    router: Matrix
    experts: tuple[Expert, ...]
    activate: Activate
    moe: Moe

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> MoeBlock:
        assert config.moe is not None
        names = [f"{layer}.experts.{i}" for i in range(config.moe.num_experts)]
        return MoeBlock(
            ops=ops,
            router=weights.matrix(f"{layer}.router"),
            experts=tuple(Expert(weights.matrix(f"{n}.gate_up"), weights.matrix(f"{n}.down")) for n in names),
            activate=activation(ops, config.activation),
            moe=config.moe,
        )

    def forward(self, buffers: Buffers) -> None:
        chosen, shares = self._route(buffers.normed)
        order = chosen.argsort(stable=True)
        tokens, shares = order // self.moe.experts_per_token, shares[order, None]
        counts = chosen.bincount(minlength=self.moe.num_experts).tolist()
        buffers.delta.zero_()
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                mine = tokens[start : start + count]
                result = self._compute(expert, buffers.normed[mine])
                buffers.delta.index_add_(0, mine, result.mul_(shares[start : start + count]))
                start += count
        self.ops.all_reduce(buffers.delta)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return experts and their shares, `[num_tokens * experts_per_token]`, by token."""
        scores = x.new_empty(len(x), self.moe.num_experts)
        self.router.multiply(x, scores)
        shares, chosen = scores.softmax(dim=-1, dtype=torch.float32).topk(self.moe.experts_per_token, dim=-1)
        if self.moe.normalize:
            shares /= shares.sum(dim=-1, keepdim=True)
        return chosen.flatten(), shares.flatten().to(x.dtype)

    def _compute(self, expert: Expert, x: Tensor) -> Tensor:
        width = self.moe.ffn_size
        gate_up, activated, out = x.new_empty(len(x), 2 * width), x.new_empty(len(x), width), torch.empty_like(x)
        expert.gate_up.multiply(x, gate_up)
        self.activate(gate_up, activated)
        expert.down.multiply(activated, out)
        return out
