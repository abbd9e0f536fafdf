"""`Ops` by the C kernels: float32 on the CPU."""

from __future__ import annotations

from torch import Tensor

from diptych.kernels.cpu import elementwise
from diptych.kernels.cpu.linear import PackedMatrix


class CpuOps:
    """Weights are packed once; a token's result does not depend on the batch."""

    def matrix(self, weight: Tensor) -> PackedMatrix:
        return PackedMatrix(weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        elementwise.rms_norm(x, weight, eps, out)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        elementwise.add_rms_norm(x, delta, weight, eps, out)

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        elementwise.silu_and_mul(gate_up, out)
