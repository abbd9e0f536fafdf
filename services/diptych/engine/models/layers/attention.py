"""What is before and after attention in a layer: project, norm the heads; project back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.matrix import Matrix
from diptych.engine.models.ops import Ops
from diptych.engine.models.weights import Weights


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """`project_in`, then attention, then `project_out`: in the last layer of the tokens alone that are asked about."""

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
