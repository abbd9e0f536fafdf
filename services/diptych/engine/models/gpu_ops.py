"""`Ops` by our Triton kernels and cuBLAS, on GPUs.

`GroupedExperts` computes the experts of a mixture all at once, in two grouped products: nothing waits for the GPU, and
a graph can capture it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from diptych.architectures.config import Activation
from diptych.architectures.placement import Split
from diptych.architectures.recurrent import DeltaNet
from diptych.checkpoints.quantization.weight import QuantizedWeight
from diptych.engine.models.delta_rule import DeltaRule, DeltaWeights
from diptych.engine.models.dense import dense
from diptych.engine.models.gpu_delta_rule import GpuDeltaRule
from diptych.engine.models.gpu_state_rules import TritonStateRules
from diptych.engine.models.lora import LoraMatrix
from diptych.engine.models.matrix import Activate, HeadMatrices, Matrix, TorchHeadMatrices, Weight
from diptych.engine.models.ops import Experts, Gated, GatedInTurn, activate_of, relu_squared
from diptych.engine.models.state_rules import StateRules
from diptych.kernels.gpu.layers import activations, norms, skinny_gated_gemm
from diptych.kernels.gpu.layers.moe import ExpertWeights, align_experts, choose_block, combine_experts, grouped_gemm
from diptych.kernels.gpu.layers.skinny_gemm import pays_up_to, skinny_gemm


class GpuMatrix:
    """A weight as torch keeps it, in the states' dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._transposed = weight.T
        self._few = pays_up_to(*weight.shape) if weight.dtype.itemsize == 2 else 0  # rows

    def multiply(self, x: Tensor, out: Tensor) -> None:
        if 0 < len(x) <= self._few:
            skinny_gemm(x, self.weight, out)
        else:
            torch.mm(x, self._transposed, out=out)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class GpuGated:
    """Activates the products of a few rows where they are computed, those of more, or with adapters, afterwards."""

    def __init__(self, matrix: GpuMatrix | LoraMatrix, activation: Activation, in_turn: Gated) -> None:
        self._adapted = matrix if isinstance(matrix, LoraMatrix) else None
        self._weight = _weight(matrix.base if isinstance(matrix, LoraMatrix) else matrix)
        self._activation = activation
        self._in_turn = in_turn
        num_rows, num_columns = self._weight.shape
        is_fused = self._weight.dtype.itemsize == 2 and activation in ("silu", "gelu_tanh")
        self._few = skinny_gated_gemm.pays_up_to(num_rows // 2, num_columns) if is_fused else 0  # rows

    def forward(self, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        is_adapted = self._adapted is not None and self._adapted.is_adapted
        if 0 < len(x) <= self._few and not is_adapted and self._activation in ("silu", "gelu_tanh"):
            skinny_gated_gemm.skinny_gated_gemm(x, self._weight, out, self._activation)
        else:
            self._in_turn.forward(x, gate_up, out)


class GpuOps:
    """Weights of any format are expanded to the states' dtype. Nothing waits for the device."""

    num_ranks: Final = 1
    state_rules: Final[StateRules] = TritonStateRules()

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def matrix(self, name: str, weight: Weight, split: Split) -> GpuMatrix:
        if isinstance(weight, QuantizedWeight):
            weight = dense(weight.parts, self._dtype, self._device)
        return GpuMatrix(weight)

    def head_matrices(self, weights: Tensor) -> HeadMatrices:
        return TorchHeadMatrices(weights)

    def gated(self, gate_up: Matrix, activation: Activation) -> Gated:
        assert isinstance(gate_up, GpuMatrix | LoraMatrix), gate_up
        return GpuGated(gate_up, activation, GatedInTurn(gate_up, activate_of(self, activation)))

    def experts(
        self,
        gate_up: Sequence[Matrix],
        down: Sequence[Matrix],
        sizes: tuple[int, int],
        activate: Activate,
        bias: Tensor | None = None,
    ) -> Experts:
        return GroupedExperts([_weight(each) for each in gate_up], [_weight(each) for each in down], activate, bias)

    def delta_rule(self, net: DeltaNet, weights: DeltaWeights) -> DeltaRule:
        return GpuDeltaRule(net, weights)

    def all_reduce(self, x: Tensor) -> None:
        """One rank has it all."""

    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    silu_and_mul = staticmethod(activations.silu_and_mul)
    gelu_tanh_and_mul = staticmethod(activations.gelu_tanh_and_mul)
    clamped_swiglu = staticmethod(activations.clamped_swiglu)
    relu_squared = staticmethod(relu_squared)
    norm_heads = staticmethod(norms.norm_heads)
    mul_sigmoid = staticmethod(activations.mul_sigmoid)


def _weight(matrix: Matrix) -> Tensor:
    assert isinstance(matrix, GpuMatrix), matrix
    return matrix.weight


class GroupedExperts:
    """`Experts` whose weights `[num_rows, num_columns]` stay where they are."""

    def __init__(
        self, gate_up: Sequence[Tensor], down: Sequence[Tensor], activate: Activate, bias: Tensor | None = None
    ) -> None:
        self._gate_up = ExpertWeights.of(gate_up)
        self._down = ExpertWeights.of(down)
        self._activate = activate
        self._bias = bias  # [num_experts, num_rows] of `gate_up`

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        if not len(x):  # the last layer of a step that nobody samples from
            return
        sizes = self._gate_up.tensors[0].shape[0], self._down.tensors[0].shape[1]
        rows, num_experts = chosen.numel(), len(self._down.tensors)
        aligned = align_experts(chosen, num_experts, choose_block(rows, num_experts))
        gate_up, activated = (x.new_empty(rows, size) for size in sizes)
        results = x.new_empty(rows, x.shape[1])
        grouped_gemm(x, self._gate_up, aligned, gate_up)
        if self._bias is not None:
            gate_up.add_(self._bias[chosen.flatten()])
        self._activate(gate_up, activated)
        grouped_gemm(activated, self._down, aligned, results)
        combine_experts(results, chosen, shares, out)
