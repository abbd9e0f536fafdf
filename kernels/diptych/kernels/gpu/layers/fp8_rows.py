"""Quantises the states that FP8 weights are multiplied by: each row, or each 128 columns of a row, gets a scale.

Rule: the largest number of a group becomes 448, the largest of e4m3, and nothing but its group bears on a code: a row
has the same codes beside any other rows, and wherever they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.casts import narrow, widen
from diptych.kernels.gpu.grid import cdiv, power_of_two

FP8: Final = torch.float8_e4m3fn
GROUP: Final = 128  # columns that share a scale, where not a whole row does
TILE: Final = 2048  # columns of a program that has groups
WIDEST_TILE: Final = 16_384  # columns of a program that has a row, at once
LARGEST: Final = tl.constexpr(448.0)
SMALLEST: Final = tl.constexpr(1e-12)  # a group whose numbers are all smaller is divided by this
PER_CODE: Final = tl.constexpr(1 / 448)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows in e4m3, which are to be multiplied by their scales."""

    codes: Tensor  # float8_e4m3fn [m, k]
    scales: Tensor  # float32 [m, 1], or [m, k / 128], then a column after the other

    def dequantize(self) -> Tensor:
        """Return what they stand for, in float32."""
        return self.codes.float() * spread(self.scales, self.codes.shape[1])


def spread(scales: Tensor, k: int) -> Tensor:
    """Repeat each scale of a row for the columns it belongs to, `k` in all."""
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(GROUP, dim=1)[:, :k]


def pointer(codes: Tensor) -> Tensor:
    """Return codes as a kernel takes them: the interpreter has no FP8."""
    return codes.view(torch.int8) if triton.knobs.runtime.interpret else codes


def quantize_rows(x: Tensor, group: int) -> Fp8Rows:
    """Quantise `x [m, k]`, contiguous, with a scale a row if `group` is 0, else a scale `GROUP` columns.

    The results are new tensors.
    """
    (m, k), is_grouped = x.shape, group != 0
    assert group in (0, GROUP), group
    assert x.is_contiguous(), x.stride()
    codes = torch.empty(m, k, dtype=FP8, device=x.device)
    scales = torch.empty(cdiv(k, GROUP) if is_grouped else 1, m, dtype=torch.float32, device=x.device)
    if m:
        with torch.cuda.device_of(x):
            if is_grouped:
                _quantize_groups(x, codes, scales)
            else:
                _quantize_whole_rows(x, codes, scales)
    return Fp8Rows(codes, scales.T)


def _quantize_whole_rows(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    quantize_rows_kernel[(len(x),)](
        x, pointer(codes), scales, **row_constants(x.shape[1]), COMPILED=not triton.knobs.runtime.interpret, num_warps=8
    )


def row_constants(k: int) -> dict[str, int]:
    """Return what `quantize_rows_kernel` is compiled with."""
    tile = min(WIDEST_TILE, power_of_two(k))
    return {"K": k, "TILE": tile, "STEPS": cdiv(k, tile)}


def _quantize_groups(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    m, k = x.shape
    quantize_groups_kernel[(m, cdiv(k, TILE))](
        x,
        pointer(codes),
        scales,
        m,
        K=k,
        GROUPS=TILE // GROUP,
        GROUP=GROUP,
        COMPILED=not triton.knobs.runtime.interpret,
    )


@triton.jit
def quantize_rows_kernel(
    x,
    codes,
    scales,
    K: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    of_x = x + row * K + column
    values = tl.load(of_x, mask=column < K, other=0.0)
    largest = tl.max(tl.abs(values.to(tl.float32)))
    for step in range(1, STEPS):
        more = tl.load(of_x + step * TILE, mask=column + step * TILE < K, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(more.to(tl.float32))))
    for step in range(STEPS):
        if STEPS > 1:
            values = tl.load(of_x + step * TILE, mask=column + step * TILE < K, other=0.0)
        narrowed = codes_of(values.to(tl.float32), largest, COMPILED)
        tl.store(codes + row * K + step * TILE + column, narrowed, mask=column + step * TILE < K)
    tl.store(scales + row, scale_of(largest))


@triton.jit(do_not_specialize=["m"])
def quantize_groups_kernel(
    x,
    codes,
    scales,
    m,
    K: tl.constexpr,
    GROUPS: tl.constexpr,  # of a program
    GROUP: tl.constexpr,
    COMPILED: tl.constexpr,
):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * K + column, mask=column < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    tl.store(codes + row * K + column, codes_of(values, largest[:, None], COMPILED), mask=column < K)
    tl.store(scales + number.to(tl.int64) * m + row, scale_of(largest), mask=number * GROUP < K)


@triton.jit
def scale_of(largest):
    """Return the scale of a group whose largest magnitude is known."""
    return tl.maximum(largest, SMALLEST) * PER_CODE


@triton.jit
def codes_of(values, largest, COMPILED: tl.constexpr):
    """Return the codes of a group's float32 numbers; in the interpreter, which has no FP8, as integers."""
    scaled = values * (LARGEST / tl.maximum(largest, SMALLEST))
    if COMPILED:
        return scaled.to(tl.float8e4nv)
    else:
        return narrow(scaled, "fp8_e4m3")


@triton.jit
def numbers_of(codes, COMPILED: tl.constexpr):
    """Return what codes stand for without their scale, in float32."""
    if COMPILED:
        return codes.to(tl.float32)
    else:
        return widen(codes, "fp8_e4m3")
