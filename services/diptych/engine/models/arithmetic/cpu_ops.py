"""`Ops` by the C kernels: float32 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from diptych.architectures.config import Activation
from diptych.architectures.placement import Split
from diptych.architectures.recurrent import DeltaNet
from diptych.engine.models.arithmetic.cpu_delta_rule import CpuDeltaRule
from diptych.engine.models.arithmetic.cpu_state_rules import CpuStateRules
from diptych.engine.models.arithmetic.delta_rule import DeltaRule, DeltaWeights
from diptych.engine.models.arithmetic.ops import Experts, ExpertsInTurn, Gated, GatedInTurn, activate_of, relu_squared
from diptych.engine.models.arithmetic.state_rules import StateRules
from diptych.engine.models.matrices.matrix import Activate, HeadMatrices, HeadMatricesInTurn, Matrix, Weight
from diptych.engine.models.ranks import ALONE, Ranks
from diptych.kernels.cpu import elementwise
from diptych.kernels.cpu.linear import PackedMatrix, QuantizedMatrix, StackedMatrix


class CpuOps:
    """Weights are packed once; a token's result does not depend on the batch."""

    ranks: Final[Ranks] = ALONE
    state_rules: Final[StateRules] = CpuStateRules()
    mixes_by_token: Final = True

    def matrix(self, name: str, weight: Weight, split: Split) -> Matrix:
        if isinstance(weight, Tensor):
            return PackedMatrix(weight)
        parts = [QuantizedMatrix(part) for part in weight.parts]
        return parts[0] if len(parts) == 1 else StackedMatrix(parts)

    def head_matrices(self, weights: Tensor) -> HeadMatrices:
        return HeadMatricesInTurn([PackedMatrix(each.contiguous()) for each in weights])

    def gated(self, gate_up: Matrix, activation: Activation) -> Gated:
        return GatedInTurn(gate_up, activate_of(self, activation))

    def experts(
        self,
        gate_up: Sequence[Matrix],
        down: Sequence[Matrix],
        sizes: tuple[int, int],
        activate: Activate,
        bias: Tensor | None = None,
    ) -> Experts:
        return ExpertsInTurn(gate_up, down, sizes, activate, bias)

    def delta_rule(self, net: DeltaNet, weights: DeltaWeights) -> DeltaRule:
        return CpuDeltaRule(net, weights)

    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    silu_and_mul = staticmethod(elementwise.silu_and_mul)
    gelu_tanh_and_mul = staticmethod(elementwise.gelu_tanh_and_mul)
    clamped_swiglu = staticmethod(elementwise.clamped_swiglu)
    relu_squared = staticmethod(relu_squared)
    norm_heads = staticmethod(elementwise.norm_heads)
    mul_sigmoid = staticmethod(elementwise.mul_sigmoid)
