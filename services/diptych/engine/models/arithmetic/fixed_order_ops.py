"""`Ops` on GPUs by which a token's numbers do not depend on the others of its step: `--deterministic`.

Every product is made by one kernel that adds up in one order, whatever the number of rows: no library chooses another
one for another batch. Experts take rows by the block of one size. What is quantised is expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from diptych.architectures.config import Activation
from diptych.architectures.placement import Split
from diptych.checkpoints.quantization.weight import QuantizedWeight
from diptych.engine.models.arithmetic.gpu_ops import GpuOps
from diptych.engine.models.arithmetic.ops import Experts, Gated, GatedInTurn, activate_of
from diptych.engine.models.matrices.dense import dense
from diptych.engine.models.matrices.gpu_experts import GroupedExperts
from diptych.engine.models.matrices.matrix import Activate, Matrix, Weight
from diptych.kernels.gpu.layers.fixed_gemm import fixed_gemm
from diptych.kernels.gpu.layers.moe import ExpertWeights

BLOCK = 64  # rows of an expert that are multiplied at once


class FixedOrderMatrix:
    """A weight as torch keeps it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def multiply(self, x: Tensor, out: Tensor) -> None:
        fixed_gemm(x, self.weight, out)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


@dataclass(frozen=True, slots=True)
class FixedBlockWeights(ExpertWeights):
    """Weights of experts that multiply as many rows at once in every step."""

    def block(self, num_assignments: int) -> int:
        return BLOCK


class FixedOrderOps(GpuOps):
    """The arithmetic of `GpuOps` but for its products."""

    def matrix(self, name: str, weight: Weight, split: Split) -> FixedOrderMatrix:
        if isinstance(weight, QuantizedWeight):
            weight = dense(weight.parts, self._dtype, self._device)
        return FixedOrderMatrix(weight)

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
        return GroupedExperts(_grouped(gate_up), _grouped(down), activate, bias)


def _grouped(matrices: Sequence[Matrix]) -> FixedBlockWeights:
    weights = [each.weight for each in matrices if isinstance(each, FixedOrderMatrix)]
    assert len(weights) == len(matrices), "not of these ops"
    return FixedBlockWeights.of(weights)
