"""How a layer that guesses begins: with a token's embedding and the hidden row before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.layers.norm import Norm, new_norm
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights


@dataclass(frozen=True, slots=True)
class RowJoint:
    """Norms both and multiplies them, side by side, by one matrix: see `architectures.next_layer`."""

    ops: Ops
    token_norm: Tensor  # [hidden_size], and so is
    row_norm: Tensor
    join: Matrix  # [hidden_size, 2 * hidden_size]
    eps: float

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops) -> RowJoint:
        norms = weights.norm("token_norm"), weights.norm("row_norm")
        return RowJoint(ops, *norms, weights.matrix("join"), config.rms_norm_eps)

    def joined(self, embedded: Tensor, rows: Tensor) -> Tensor:
        """Both are `[num_tokens, hidden_size]`, and so is what is returned."""
        token, row, out = torch.empty_like(embedded), torch.empty_like(rows), torch.empty_like(embedded)
        self.ops.rms_norm(embedded, self.token_norm, self.eps, token)
        self.ops.rms_norm(rows, self.row_norm, self.eps, row)
        self.join.multiply(torch.cat((token, row), dim=1), out)
        return out


@dataclass(frozen=True, slots=True)
class HeadJoint:
    """Norms both and leaves them side by side: see `architectures.eagle`."""

    token_norm: Norm
    row_norm: Norm

    @staticmethod
    def build(config: ModelConfig, weights: Weights, ops: Ops) -> HeadJoint:
        token_norm, row_norm = (new_norm(config, weights, ops, name) for name in ("0.input_norm", "row_norm"))
        return HeadJoint(token_norm, row_norm)

    def beside(self, embedded: Tensor, rows: Tensor) -> Tensor:
        """Both are `[num_tokens, hidden_size]`; what is returned is twice as wide."""
        token, row = torch.empty_like(embedded), torch.empty_like(rows)
        self.token_norm.apply(embedded, token)
        self.row_norm.apply(rows, row)
        return torch.cat((token, row), dim=1)
