"""Weights of integers on GPUs: widened inside the product where rows are few, and a part at a time before it else.

A prompt of thousands of tokens is multiplied by cuBLAS, whose time hides what widening costs: two passes through
memory, or less where a part stays in the L2 cache. The workspace is torch's to share: a step's largest product has it,
and the next one finds it free.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch
from torch import Tensor

from diptych.kernels.gpu.layers.integer_gemm import integer_gemm, most_tiles, pays_up_to
from diptych.kernels.gpu.layers.integer_matrix import IntegerMatrix, widen
from diptych.kernels.integer_layout import layout_of
from diptych.kernels.quantized import QuantizedArray

WORKSPACE_NBYTES: Final = 64 << 20
ROWS_AT_ONCE: Final = 256  # parts of a weight are multiples of so many rows


class GpuIntegers:
    """A weight of integers, to be multiplied with states of `dtype`. One stream at a time may use it."""

    SCRATCH: ClassVar = ("_counters",)  # no weights: see `engine.weights.memory`

    def __init__(self, matrix: IntegerMatrix, dtype: torch.dtype) -> None:
        self._matrix = matrix
        self._dtype = dtype  # of the states
        n, k = matrix.shape
        self._few = pays_up_to(k, matrix.layout)  # rows
        self._counters = matrix.words.new_zeros(most_tiles(n), dtype=torch.int32)
        parts = max(1, WORKSPACE_NBYTES // (k * dtype.itemsize * ROWS_AT_ONCE))
        self._at_once = min(n, parts * ROWS_AT_ONCE)  # rows of the weight that are widened

    @staticmethod
    def of(array: QuantizedArray, dtype: torch.dtype, device: torch.device) -> GpuIntegers | None:
        """Lay out `array`; None if its groups have no kernel."""
        return GpuIntegers(IntegerMatrix.of(array, device), dtype) if layout_of(array) else None

    @property
    def shape(self) -> tuple[int, int]:
        return self._matrix.shape

    @property
    def nbytes(self) -> int:
        return self._matrix.nbytes

    def multiply(self, x: Tensor, out: Tensor) -> None:
        if len(x) > self._few:
            self.multiply_widened(x, out)
        elif len(x):
            integer_gemm(x, self._matrix, self._counters, out)

    def multiply_widened(self, x: Tensor, out: Tensor) -> None:
        """`multiply`, of any number of rows, a part of the weight after the other."""
        n, k = self.shape
        workspace = x.new_empty(self._at_once, k)
        for start in range(0, n, self._at_once):
            rows = slice(start, min(n, start + self._at_once))
            part = workspace[: rows.stop - rows.start]
            widen(self._matrix, rows, part)
            torch.mm(x, part.T, out=out[:, rows])

    def rows(self, ids: Tensor) -> Tensor:
        device = self._matrix.words.device
        out = torch.empty(len(ids), self.shape[1], dtype=self._dtype, device=device)
        widen(self._matrix, ids.to(device), out)
        return out

    def dense(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self._dtype, device=self._matrix.words.device)
        widen(self._matrix, slice(0, len(out)), out)
        return out
