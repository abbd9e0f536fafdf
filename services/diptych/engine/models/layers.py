"""The parts of a decoder layer, shared by all families, and what they pass on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig, Moe
from diptych.engine.models.matrix import Matrix
from diptych.engine.models.ops import Experts, Gated, Ops, activate_of
from diptych.engine.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Buffers:
    """What operations pass on, each `[num_tokens, ...]`. The next layer overwrites it, so memory is touched once."""

    normed: Tensor
    qkv: Tensor
    attended: Tensor
    delta: Tensor  # to be added to the residual stream
    gate_up: Tensor
    activated: Tensor

    @staticmethod
    def allocate(config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, ffn = config.hidden_size, config.ffn_size
        sizes = (hidden, q_size + 2 * kv_size, q_size, hidden, 2 * ffn, ffn)
        return Buffers(*(torch.empty(num_tokens, size, dtype=dtype, device=device) for size in sizes))

    def first(self, num_tokens: int) -> Buffers:
        """Return those of fewer tokens, in the same memory."""
        return Buffers(*(getattr(self, each.name)[:num_tokens] for each in fields(self)))


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """What is before attention and after it: in the last layer of the tokens alone that are asked about."""

    num_heads: int
    ops: Ops
    qkv: Matrix
    qkv_bias: Tensor | None
    o: Matrix
    head_norms: tuple[Tensor, Tensor] | None  # of queries and of keys
    eps: float

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> AttentionBlock:
        head_norms = (weights.norm(f"{layer}.q_norm"), weights.norm(f"{layer}.k_norm")) if config.qk_norm else None
        return AttentionBlock(
            num_heads=config.num_heads,
            ops=ops,
            qkv=weights.matrix(f"{layer}.qkv"),
            qkv_bias=weights.vector(f"{layer}.qkv_bias"),
            o=weights.matrix(f"{layer}.o"),
            head_norms=head_norms,
            eps=config.rms_norm_eps,
        )

    def project_in(self, buffers: Buffers) -> None:
        """`normed` -> `qkv`."""
        self.qkv.multiply(buffers.normed, buffers.qkv)
        if self.qkv_bias is not None:
            buffers.qkv.add_(self.qkv_bias)
        if self.head_norms is not None:
            self.ops.norm_heads(buffers.qkv, self.num_heads, *self.head_norms, self.eps)

    def project_out(self, buffers: Buffers) -> None:
        """`attended` -> `delta`."""
        self.o.multiply(buffers.attended, buffers.delta)
        self.ops.all_reduce(buffers.delta)


class FeedForward(Protocol):
    """What follows attention in a layer."""

    def forward(self, buffers: Buffers) -> None:
        """`normed` -> `delta`."""
        ...


@dataclass(frozen=True, slots=True)
class Mlp:
    """One network for all tokens: gate and up together, activation, down."""

    ops: Ops
    gated: Gated
    down: Matrix

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> Mlp:
        gated = ops.gated(weights.matrix(f"{layer}.gate_up"), config.activation)
        return Mlp(ops, gated, weights.matrix(f"{layer}.down"))

    def forward(self, buffers: Buffers) -> None:
        self.gated.forward(buffers.normed, buffers.gate_up, buffers.activated)
        self.down.multiply(buffers.activated, buffers.delta)
        self.ops.all_reduce(buffers.delta)


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """A mixture of experts: a router chooses a few networks for each token, and shares for what they return."""

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
