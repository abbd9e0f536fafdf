"""A weight in FP8 (e4m3) as a GPU keeps it: the codes of its checkpoint, and a scale a row, or a block of 128 x 128."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.fp8_rows import FP8, GROUP, LARGEST, SMALLEST
from diptych.kernels.quantized import Array, QuantizedArray

PITCH: Final = 4  # rows of scales begin at multiples of so many, as cuBLAS wants them
ROWS_AT_ONCE: Final = 4096  # that are quantised: in float32
MAX_PARTS: Final = 8  # of rows; more: scales that are no blocks'


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A weight `[n, k]`."""

    codes: Tensor  # float8_e4m3fn [n, k]
    scales: Tensor  # float32 [n, 1]; of blocks [n / 128, k / 128], of strides (`pitch`, 1)
    group: int  # rows and columns of a block; 0: a scale a row

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def pitch(self) -> int:
        """Numbers from a row of scales to the next."""
        return pitch_of(self.shape[1], self.group)

    @staticmethod
    def of(array: QuantizedArray, device: torch.device) -> Fp8Matrix:
        """Take over what `can_keep` is true of, in memory of `device`."""
        assert array.scales is not None
        codes = torch.tensor(array.codes, device=device).view(FP8)  # a copy: files are read where they are
        scales = torch.tensor(array.scales[:: array.group or 1], dtype=torch.float32, device=device)
        return Fp8Matrix(codes, _pitched(scales) if array.group else scales, array.group)

    @staticmethod
    def made(weight: Tensor) -> Fp8Matrix:
        """Quantise a weight `[n, k]` of floats, with a scale a row, by the rule of `quantize_rows`."""
        scales = weight.abs().amax(dim=1, keepdim=True).float().clamp(min=SMALLEST.value) / LARGEST.value
        codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        for start in range(0, len(weight), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            codes[part] = (weight[part].float() / scales[part]).to(FP8)
        return Fp8Matrix(codes, scales, 0)

    def rows(self, ids: Tensor) -> Tensor:
        """Return some rows in float32."""
        numbers = self.codes.view(torch.int8)[ids].view(FP8).float()
        if not self.group:
            return numbers * self.scales[ids]
        scales = self.scales[ids // self.group]
        return numbers * scales.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]

    def dequantize(self) -> Tensor:
        """Return it in float32."""
        return self.rows(torch.arange(len(self.codes), device=self.codes.device))


def pitch_of(k: int, group: int) -> int:
    """See `Fp8Matrix.pitch`, for `k` columns."""
    return cdiv(cdiv(k, group), PITCH) * PITCH if group else 1


def can_keep(array: QuantizedArray) -> bool:
    """Whether it is FP8 with a scale a row, or with one a block of 128 x 128."""
    if array.code != "fp8" or array.scales is None or array.mins is not None:
        return False
    return array.group == 0 or (array.group == GROUP and len(_starts(array.scales)) <= MAX_PARTS)


def blocks_of(array: QuantizedArray) -> list[QuantizedArray]:
    """Cut the rows of what `can_keep` is true of so that blocks begin with each part: `Fp8Matrix.of` takes those.

    Matrices with a last block that is not full may be on top of each other.
    """
    assert array.scales is not None
    starts = _starts(array.scales) if array.group else [0]
    return [array.rows(slice(start, end)) for start, end in itertools.pairwise([*starts, len(array)])]


def _starts(scales: Array) -> list[int]:
    """Return where blocks of rows that share their scales begin anew."""
    starts = [0]
    for change in np.flatnonzero((scales[1:] != scales[:-1]).any(axis=1)) + 1:
        if (change - starts[-1]) % GROUP:
            starts.append(int(change))
    return starts


def _pitched(scales: Tensor) -> Tensor:
    num_rows, num_columns = scales.shape
    whole = scales.new_ones(num_rows, cdiv(num_columns, PITCH) * PITCH)
    whole[:, :num_columns] = scales
    return whole[:, :num_columns]
