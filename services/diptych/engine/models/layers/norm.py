"""Norms of the residual stream: of what goes into a block of a layer, and of what leaves the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.matrices.weights import Weights


class Norm(Protocol):
    """Norms rows of `[num_tokens, hidden_size]`, each by itself."""

    def apply(self, x: Tensor, out: Tensor) -> None:
        """`x` -> `out`."""
        ...

    def add(self, x: Tensor, delta: Tensor, out: Tensor) -> None:
        """Add `delta` to `x` in place, and norm the sum to `out`."""
        ...

    def add_sum(self, x: Tensor, delta: Tensor, out: Tensor) -> bool:
        """The same with the sum of all ranks' `delta`, in one call; return False, and do nothing, if that can't be."""
        ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """By the root of the mean of squares."""

    ops: Ops
    weight: Tensor  # [hidden_size]
    eps: float

    def apply(self, x: Tensor, out: Tensor) -> None:
        self.ops.rms_norm(x, self.weight, self.eps, out)

    def add(self, x: Tensor, delta: Tensor, out: Tensor) -> None:
        self.ops.add_rms_norm(x, delta, self.weight, self.eps, out)

    def add_sum(self, x: Tensor, delta: Tensor, out: Tensor) -> bool:
        return self.ops.ranks.all_reduce_add_rms_norm(x, delta, self.weight, self.eps, out)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """By the deviation from the mean, which is subtracted (arXiv 1607.06450), in float32."""

    weight: Tensor  # float32 [hidden_size]
    bias: Tensor  # the same
    eps: float

    def apply(self, x: Tensor, out: Tensor) -> None:
        out.copy_(F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps))

    def add(self, x: Tensor, delta: Tensor, out: Tensor) -> None:
        self.apply(x.add_(delta), out)

    def add_sum(self, x: Tensor, delta: Tensor, out: Tensor) -> bool:
        return False


def new_norm(config: ModelConfig, weights: Weights, ops: Ops, name: str) -> Norm:
    """Return the norm that is loaded as `name`."""
    if not config.centred_norms:
        return RmsNorm(ops, weights.norm(name), config.rms_norm_eps)
    return LayerNorm(weights.norm(name).float(), weights.constant(f"{name}_bias").float(), config.rms_norm_eps)
