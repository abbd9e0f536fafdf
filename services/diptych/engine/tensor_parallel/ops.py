"""`Ops` for one of several ranks: another implementation computes, the communicator puts the parts together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.architectures.config import Activation
from diptych.architectures.placement import Split
from diptych.architectures.recurrent import DeltaNet
from diptych.engine.models.arithmetic.delta_rule import DeltaRule, DeltaWeights
from diptych.engine.models.arithmetic.ops import Experts, Gated, Ops
from diptych.engine.models.arithmetic.state_rules import StateRules
from diptych.engine.models.matrices.matrix import Activate, HeadMatrices, Matrix, Weight
from diptych.engine.models.ranks import Ranks
from diptych.engine.tensor_parallel.communicator import Communicator

_VOCABULARY = ("embed", "embed_per_layer", "lm_head")


class TensorParallelOps:
    """Implements `Ops`. Matrices come cut to this rank's part."""

    def __init__(self, ops: Ops, communicator: Communicator) -> None:
        self._ops = ops
        self._communicator = communicator

    @property
    def ranks(self) -> Ranks:
        return self._communicator

    @property
    def state_rules(self) -> StateRules:
        return self._ops.state_rules

    @property
    def mixes_by_token(self) -> bool:
        return self._ops.mixes_by_token

    def matrix(self, name: str, weight: Weight, split: Split) -> Matrix:
        matrix = self._ops.matrix(name, weight, split)
        return VocabularyMatrix(matrix, weight.shape[0], self._communicator) if name in _VOCABULARY else matrix

    def head_matrices(self, weights: Tensor) -> HeadMatrices:
        return self._ops.head_matrices(weights)

    def gated(self, gate_up: Matrix, activation: Activation) -> Gated:
        return self._ops.gated(gate_up, activation)

    def experts(
        self,
        gate_up: Sequence[Matrix],
        down: Sequence[Matrix],
        sizes: tuple[int, int],
        activate: Activate,
        bias: Tensor | None = None,
    ) -> Experts:
        return self._ops.experts(gate_up, down, sizes, activate, bias)

    def delta_rule(self, net: DeltaNet, weights: DeltaWeights) -> DeltaRule:
        return self._ops.delta_rule(net, weights)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self._ops.rms_norm(x, weight, eps, out)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self._ops.add_rms_norm(x, delta, weight, eps, out)

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        self._ops.silu_and_mul(gate_up, out)

    def gelu_tanh_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        self._ops.gelu_tanh_and_mul(gate_up, out)

    def clamped_swiglu(self, gate_up: Tensor, out: Tensor, *, alpha: float, limit: float) -> None:
        self._ops.clamped_swiglu(gate_up, out, alpha=alpha, limit=limit)

    def relu_squared(self, up: Tensor, out: Tensor) -> None:
        self._ops.relu_squared(up, out)

    def norm_heads(self, qkv: Tensor, num_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
        self._ops.norm_heads(qkv, num_heads, q_weight, k_weight, eps)

    def mul_sigmoid(self, x: Tensor, gates: Tensor) -> None:
        self._ops.mul_sigmoid(x, gates)


class VocabularyMatrix:
    """Implements `Matrix`: this rank has the tokens `[rank * num_rows, (rank + 1) * num_rows)`."""

    def __init__(self, matrix: Matrix, num_rows: int, communicator: Communicator) -> None:
        self._matrix = matrix
        self._num_rows = num_rows
        self._communicator = communicator

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Compute logits, `[num_tokens, vocab_size]`. Only rank 0 gets them: it alone samples."""
        part = torch.empty(len(x), self._num_rows, dtype=x.dtype, device=x.device)
        self._matrix.multiply(x, part)
        parts = self._communicator.gather(part)
        if parts is not None:
            out.copy_(torch.cat(parts, dim=1)[:, : out.shape[1]])

    def rows(self, ids: Tensor) -> Tensor:
        """Look up what is ours, nothing for the rest, and add up."""
        own = ids - self._communicator.rank * self._num_rows
        is_ours = (own >= 0) & (own < self._num_rows)
        rows = self._matrix.rows(own.where(is_ours, 0)).masked_fill_(~is_ours[:, None], 0)
        self._communicator.all_reduce(rows)
        return rows
