"""Weights in FP8 (e4m3) on GPUs: kept as stored, or made so when they are loaded. Products quantise the states, too."""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from diptych.engine.models.adapters.lora import LoraMatrix
from diptych.engine.models.arithmetic.ops import Gated
from diptych.engine.models.matrices.matrix import Matrix
from diptych.kernels.gpu.layers.fp8_gemm import fp8_gemm
from diptych.kernels.gpu.layers.fp8_gemv import can_gate, fp8_gated_gemv
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix

CAPABILITIES: Final = (9, 10)  # major, of GPUs that have FP8, and shared memory for what is on its way


def has_fp8(device: torch.device) -> bool:
    """Whether kernels of `device` multiply in FP8; the interpreter does as if."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in CAPABILITIES


class Fp8Kept:
    """Implements `KeptMatrix`."""

    def __init__(self, weight: Fp8Matrix, dtype: torch.dtype) -> None:
        self.weight = weight
        self._dtype = dtype  # of the states

    @staticmethod
    def made(weight: Tensor) -> Fp8Kept:
        """Quantise a weight in the states' dtype, with a scale a row."""
        return Fp8Kept(Fp8Matrix.made(weight), weight.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    def multiply(self, x: Tensor, out: Tensor) -> None:
        fp8_gemm(x, self.weight, out)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight.rows(ids).to(self._dtype)

    def dense(self) -> Tensor:
        return self.weight.dequantize().to(self._dtype)


class Fp8Gated:
    """Activates the products of one row where they are computed, those of more, or with adapters, afterwards."""

    def __init__(self, matrix: Matrix, base: Fp8Kept, activation: Literal["silu", "gelu_tanh"], in_turn: Gated) -> None:
        self._adapted = matrix if isinstance(matrix, LoraMatrix) else None
        self._weight = base.weight
        self._activation = activation
        self._in_turn = in_turn
        self._few = 1 if can_gate(base.weight) else 0  # rows

    def forward(self, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        is_adapted = self._adapted is not None and self._adapted.is_adapted
        if len(x) == self._few == 1 and not is_adapted:
            fp8_gated_gemv(x, self._weight, out, self._activation)
        else:
            self._in_turn.forward(x, gate_up, out)
