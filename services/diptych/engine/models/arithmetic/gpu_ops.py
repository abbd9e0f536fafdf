"""`Ops` by our Triton kernels and cuBLAS, on GPUs."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from diptych.architectures.config import Activation
from diptych.architectures.placement import Split
from diptych.architectures.recurrent import DeltaNet
from diptych.architectures.size import EXPERT
from diptych.checkpoints.quantization.weight import QuantizedWeight
from diptych.engine.models.adapters.lora import LoraMatrix
from diptych.engine.models.arithmetic.delta_rule import DeltaRule, DeltaWeights
from diptych.engine.models.arithmetic.gpu_delta_rule import GpuDeltaRule
from diptych.engine.models.arithmetic.gpu_state_rules import TritonStateRules
from diptych.engine.models.arithmetic.ops import Experts, Gated, GatedInTurn, activate_of, relu_squared
from diptych.engine.models.arithmetic.state_rules import StateRules
from diptych.engine.models.matrices.dense import dense
from diptych.engine.models.matrices.gpu_experts import (
    GroupedExperts,
    GroupedWeights,
    PackedMatrix,
    grouped,
    narrowed,
    packed,
)
from diptych.engine.models.matrices.gpu_fp8 import Fp8Gated, Fp8Kept
from diptych.engine.models.matrices.gpu_quantized import TWO_BYTES, kept
from diptych.engine.models.matrices.matrix import Activate, HeadMatrices, Matrix, TorchHeadMatrices, Weight
from diptych.engine.models.ranks import ALONE, Ranks
from diptych.kernels.gpu.layers import activations, norms, skinny_gated_gemm
from diptych.kernels.gpu.layers.moe import ExpertWeights
from diptych.kernels.gpu.layers.skinny_gemm import pays_up_to, skinny_gemm

logger = logging.getLogger(__name__)


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

    def __init__(self, matrix: Matrix, base: GpuMatrix, activation: Activation, in_turn: Gated) -> None:
        self._adapted = matrix if isinstance(matrix, LoraMatrix) else None
        self._weight = base.weight
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
    """Weights that `kept` or, of experts, `packed` knows stay as stored; others are expanded to the states' dtype.

    Of these, targets that match `to_narrow` are made FP8. Nothing waits for the device.
    """

    ranks: Final[Ranks] = ALONE
    state_rules: Final[StateRules] = TritonStateRules()
    mixes_by_token: Final = False

    def __init__(self, dtype: torch.dtype, device: torch.device, to_narrow: re.Pattern[str] | None = None) -> None:
        self._dtype = dtype
        self._device = device
        self._to_narrow = to_narrow
        self._expanded = set[str]()  # formats that the log names

    def matrix(self, name: str, weight: Weight, split: Split) -> Matrix:
        if isinstance(weight, QuantizedWeight):
            keep = packed if EXPERT.match(name) else kept
            as_stored = keep(weight, self._dtype, self._device)
            if as_stored is not None:
                return as_stored
            weight = self._dense(name, weight)
        if self._to_narrow is None or not self._to_narrow.fullmatch(name):
            return GpuMatrix(weight)
        return narrowed(weight) or GpuMatrix(weight) if EXPERT.match(name) else Fp8Kept.made(weight)

    def _dense(self, name: str, weight: QuantizedWeight) -> Tensor:
        """Expand it, and say so, once for each format."""
        for part in weight.parts:
            if part.code not in TWO_BYTES and part.code not in self._expanded:
                self._expanded.add(part.code)
                logger.warning(
                    "weights in %s are expanded to %s, no kernel keeps them: the first is %s, %d bytes instead of %d",
                    part.code,
                    str(self._dtype).removeprefix("torch."),
                    name,
                    part.codes.size * self._dtype.itemsize,
                    part.nbytes,
                )
        return dense(weight.parts, self._dtype, self._device)

    def head_matrices(self, weights: Tensor) -> HeadMatrices:
        return TorchHeadMatrices(weights)

    def gated(self, gate_up: Matrix, activation: Activation) -> Gated:
        in_turn = GatedInTurn(gate_up, activate_of(self, activation))
        base = gate_up.base if isinstance(gate_up, LoraMatrix) else gate_up
        if isinstance(base, Fp8Kept) and activation in ("silu", "gelu_tanh"):
            return Fp8Gated(gate_up, base, activation, in_turn)
        return GpuGated(gate_up, base, activation, in_turn) if isinstance(base, GpuMatrix) else in_turn

    def experts(
        self,
        gate_up: Sequence[Matrix],
        down: Sequence[Matrix],
        sizes: tuple[int, int],
        activate: Activate,
        bias: Tensor | None = None,
    ) -> Experts:
        return GroupedExperts(_grouped(gate_up), _grouped(down), activate, bias)

    def delta_rule(self, net: DeltaNet, weights: DeltaWeights) -> DeltaRule:
        return GpuDeltaRule(net, weights)

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


def _grouped(matrices: Sequence[Matrix]) -> GroupedWeights:
    """Put the matrices of experts together: packed if all are."""
    kept_so = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
    together = grouped(kept_so) if len(kept_so) == len(matrices) else None
    if kept_so and together is None:
        logger.warning("experts of a layer are stored in several formats: %d are expanded", len(kept_so))
    return together or ExpertWeights.of(
        [each.dense() if isinstance(each, PackedMatrix) else _weight(each) for each in matrices]
    )
