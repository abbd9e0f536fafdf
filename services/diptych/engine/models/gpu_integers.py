"""Weights of integers on GPUs: widened inside the product where rows are few, and a part at a time before it else.

A prompt of thousands of tokens is multiplied by cuBLAS, whose time hides what widening costs: two passes through
memory, or less where a part stays in the L2 cache. The workspace is torch's to share: a step's largest product has it,
and the next one finds it free.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from diptych.engine.models.lora import LoraMatrix
from diptych.engine.models.matrix import Matrix
from diptych.engine.models.ops import Gated
from diptych.kernels.gpu.layers import integer_few_rows
from diptych.kernels.gpu.layers.integer_gemm import integer_gemm, most_tiles, pays_up_to
from diptych.kernels.gpu.layers.integer_matrix import IntegerMatrix, widen
from diptych.kernels.integer_layout import layout_of
from diptych.kernels.quantized import QuantizedArray

WORKSPACE_NBYTES: Final = 64 << 20
ROWS_AT_ONCE: Final = 256  # parts of a weight are multiples of so many rows


class GpuIntegers:
    """A weight of integers, to be multiplied with states of `dtype`. One stream at a time may use it."""

    def __init__(self, matrix: IntegerMatrix, dtype: torch.dtype) -> None:
        self.weight = matrix
        self.dtype = dtype  # of the states
        n, k = matrix.shape
        self._few = pays_up_to(n, k, matrix.layout)  # rows
        self._counters = matrix.words.new_zeros(most_tiles(n), dtype=torch.int32)
        parts = max(1, WORKSPACE_NBYTES // (k * dtype.itemsize * ROWS_AT_ONCE))
        self._at_once = min(n, parts * ROWS_AT_ONCE)  # rows of the weight that are widened

    @staticmethod
    def of(array: QuantizedArray, dtype: torch.dtype, device: torch.device) -> GpuIntegers | None:
        """Lay out `array`; None if its groups have no kernel."""
        return GpuIntegers(IntegerMatrix.of(array, device), dtype) if layout_of(array) else None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def multiply(self, x: Tensor, out: Tensor) -> None:
        if len(x) > self._few:
            self.multiply_widened(x, out)
        elif len(x) > integer_few_rows.PAYS_UP_TO:
            integer_gemm(x, self.weight, self._counters, out)
        elif len(x):
            integer_few_rows.integer_few_rows(x, self.weight, out)

    def multiply_widened(self, x: Tensor, out: Tensor) -> None:
        """`multiply`, of any number of rows, a part of the weight after the other."""
        n, k = self.shape
        workspace = x.new_empty(self._at_once, k)
        for start in range(0, n, self._at_once):
            rows = slice(start, min(n, start + self._at_once))
            part = workspace[: rows.stop - rows.start]
            widen(self.weight, rows, part)
            torch.mm(x, part.T, out=out[:, rows])

    def rows(self, ids: Tensor) -> Tensor:
        out = torch.empty(len(ids), self.shape[1], dtype=self.dtype, device=ids.device)
        widen(self.weight, ids, out)
        return out

    def dense(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=self.weight.words.device)
        widen(self.weight, slice(0, len(out)), out)
        return out


class IntegersGated:
    """Activates the products of a few rows where they are computed, those of more, or with adapters, afterwards."""

    def __init__(
        self, matrix: Matrix, base: GpuIntegers, activation: Literal["silu", "gelu_tanh"], in_turn: Gated
    ) -> None:
        self._adapted = matrix if isinstance(matrix, LoraMatrix) else None
        self._weight = base.weight
        self._activation = activation
        self._in_turn = in_turn
        self._few = integer_few_rows.PAYS_UP_TO if integer_few_rows.can_gate(base.weight, base.dtype) else 0

    def forward(self, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        is_adapted = self._adapted is not None and self._adapted.is_adapted
        if 0 < len(x) <= self._few and not is_adapted:
            integer_few_rows.integer_few_rows_gated(x, self._weight, out, self._activation)
        else:
            self._in_turn.forward(x, gate_up, out)
