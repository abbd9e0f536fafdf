"""`Ops` by our Triton kernels and cuBLAS, on GPUs.

`GroupedExperts` computes the experts of a mixture all at once, in two grouped products: nothing waits for the GPU, and
a graph can capture it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from diptych.architectures.config import Activation
from diptych.architectures.placement import Split
from diptych.architectures.recurrent import DeltaNet
from diptych.architectures.size import EXPERT
from diptych.checkpoints.quantization.weight import QuantizedWeight
from diptych.engine.models.delta_rule import DeltaRule, DeltaWeights
from diptych.engine.models.dense import dense
from diptych.engine.models.gpu_delta_rule import GpuDeltaRule
from diptych.engine.models.gpu_fp8 import Fp8Gated, Fp8Kept
from diptych.engine.models.gpu_quantized import TWO_BYTES, kept
from diptych.engine.models.gpu_state_rules import TritonStateRules
from diptych.engine.models.lora import LoraMatrix
from diptych.engine.models.matrix import Activate, HeadMatrices, Matrix, TorchHeadMatrices, Weight
from diptych.engine.models.ops import Experts, Gated, GatedInTurn, activate_of, relu_squared
from diptych.engine.models.state_rules import StateRules
from diptych.kernels.gpu.layers import activations, mxfp4_experts, norms, skinny_gated_gemm
from diptych.kernels.gpu.layers.moe import AlignedExperts, ExpertWeights, align_experts, combine_experts
from diptych.kernels.gpu.layers.mxfp4_experts import Mxfp4Experts, Mxfp4Matrix
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


class PackedMatrix:
    """An expert's weight in MXFP4, to be multiplied with those of all experts: see `GpuOps.experts`."""

    def __init__(self, packed: Mxfp4Matrix, dtype: torch.dtype) -> None:
        self.packed = packed
        self._dtype = dtype  # of the states

    def multiply(self, x: Tensor, out: Tensor) -> None:
        torch.mm(x, self.dense().T, out=out)

    def rows(self, ids: Tensor) -> Tensor:
        return self.dense()[ids]

    def dense(self) -> Tensor:
        """Return it expanded, a new tensor."""
        return mxfp4_experts.unpack(self.packed).to(self._dtype)


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
    """Weights that `kept` knows, and experts in MXFP4, stay as stored; others are expanded to the states' dtype.

    Of these, targets that match `to_narrow` are made FP8. Nothing waits for the device.
    """

    num_ranks: Final = 1
    state_rules: Final[StateRules] = TritonStateRules()

    def __init__(self, dtype: torch.dtype, device: torch.device, to_narrow: re.Pattern[str] | None = None) -> None:
        self._dtype = dtype
        self._device = device
        self._to_narrow = to_narrow
        self._expanded = set[str]()  # formats that the log names

    def matrix(self, name: str, weight: Weight, split: Split) -> Matrix:
        if isinstance(weight, QuantizedWeight):
            as_stored = self._expert(weight) if EXPERT.match(name) else kept(weight, self._dtype, self._device)
            if as_stored is not None:
                return as_stored
            weight = self._dense(name, weight)
        is_narrowed = self._to_narrow is not None and self._to_narrow.fullmatch(name)
        return Fp8Kept.made(weight) if is_narrowed else GpuMatrix(weight)

    def _expert(self, weight: QuantizedWeight) -> Matrix | None:
        """Return an expert's matrix as it is stored, if there is a kernel."""
        if len(weight.parts) == 1 and mxfp4_experts.can_keep(weight.parts[0]):
            return PackedMatrix(Mxfp4Matrix.of(weight.parts[0], self._device), self._dtype)
        return None

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


def _grouped(matrices: Sequence[Matrix]) -> GroupedWeights:
    """Put the matrices of experts together: packed if all are."""
    packed = [matrix.packed for matrix in matrices if isinstance(matrix, PackedMatrix)]
    if len(packed) == len(matrices):
        return Mxfp4Experts.of(packed)
    return ExpertWeights.of([each.dense() if isinstance(each, PackedMatrix) else _weight(each) for each in matrices])


class GroupedWeights(Protocol):
    """One matrix `[n, k]` of each expert."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def num_experts(self) -> int: ...

    def block(self, num_assignments: int) -> int:
        """Return how many rows should be multiplied at once; more will do, too."""
        ...

    def multiply(
        self, x: Tensor, aligned: AlignedExperts, chosen: Tensor, out: Tensor, bias: Tensor | None = None
    ) -> None:
        """Multiply each assignment's row of `x`, which has a row for each token or each assignment, into `out`.

        `aligned` are the assignments `chosen`. `bias`, `[num_experts, n]`, is added.
        """
        ...


class GroupedExperts:
    """`Experts` whose weights stay where they are."""

    def __init__(
        self, gate_up: GroupedWeights, down: GroupedWeights, activate: Activate, bias: Tensor | None = None
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activate = activate
        self._bias = bias  # [num_experts, num_rows] of `gate_up`

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        if not len(x):  # the last layer of a step that nobody samples from
            return
        sizes = self._gate_up.shape[0], self._down.shape[1]
        rows, num_experts = chosen.numel(), self._down.num_experts
        block = max(self._gate_up.block(rows), self._down.block(rows))
        aligned = align_experts(chosen, num_experts, block)
        gate_up, activated = (x.new_empty(rows, size) for size in sizes)
        results = x.new_empty(rows, x.shape[1])
        self._gate_up.multiply(x, aligned, chosen, gate_up, self._bias)
        self._activate(gate_up, activated)
        self._down.multiply(activated, aligned, chosen, results)
        combine_experts(results, chosen, shares, out)
