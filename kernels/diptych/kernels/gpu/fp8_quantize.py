"""FP8 (e4m3) copies of activations: with a scale of each row's own, found in the same pass, or with one known before.

A number is what is stored times its scale. Rule: numbers are multiplied by the inverse of the scale in float32, rounded
to nearest even, and what is beyond the largest of FP8, 448, becomes that; NaN stays, and counts for no scale.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.fp8_cast import casts_to_fp8
from diptych.kernels.gpu.grid import cdiv, power_of_two
from diptych.kernels.gpu.rows import LARGEST_ROW, warps
from diptych.kernels.gpu_casts import narrow

LARGEST: Final = 448.0
SMALLEST_PEAK: Final = 1e-30  # a row of zeros has a scale, too, and no scale has an infinite inverse
TILE_NUMBERS: Final = 4096
NAN_BITS: Final = tl.constexpr(0x7F)


def quantize_fp8(x: Tensor, out: Tensor, scales: Tensor) -> None:
    """Quantise each row of `x [num_rows, size]` by its largest number.

    `out` is float8_e4m3fn of the same shape, `scales` float32 `[num_rows]`; all are contiguous.
    """
    _check(x, out)
    num_rows, size = x.shape
    assert size <= LARGEST_ROW, x.shape
    assert (scales.shape, scales.dtype) == ((num_rows,), torch.float32), (scales.shape, scales.dtype)
    columns = power_of_two(size)
    with torch.cuda.device_of(x):
        quantize_rows_kernel[(num_rows,)](
            x,
            out.view(torch.int8),
            scales,
            SIZE=size,
            COLUMNS=columns,
            NATIVE=casts_to_fp8(x),
            num_warps=warps(columns),
        )


def quantize_fp8_static(x: Tensor, out: Tensor, scale: float) -> None:
    """Quantise `x` of any shape by a scale; `out` is float8_e4m3fn of the same shape, both contiguous."""
    _check(x, out)
    with torch.cuda.device_of(x):
        quantize_kernel[(cdiv(x.numel(), TILE_NUMBERS),)](
            x, out.view(torch.int8), 1.0 / scale, x.numel(), TILE=TILE_NUMBERS, NATIVE=casts_to_fp8(x)
        )


def reference_quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `quantize_fp8` writes, and the scales."""
    peaks = x.float().abs().nan_to_num(0.0, posinf=torch.inf).amax(dim=1).clamp(min=SMALLEST_PEAK)
    scaled = x.float() * (torch.full_like(peaks, LARGEST) / peaks)[:, None]  # torch rounds `number / tensor` twice
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), peaks * (1 / LARGEST)


def reference_quantize_fp8_static(x: Tensor, scale: float) -> Tensor:
    """Return what `quantize_fp8_static` writes."""
    return (x.float() * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _check(x: Tensor, out: Tensor) -> None:
    assert (out.shape, out.dtype) == (x.shape, torch.float8_e4m3fn), (out.shape, x.shape, out.dtype)
    assert x.is_contiguous(), x.stride()
    assert out.is_contiguous(), out.stride()


@triton.jit
def quantize_rows_kernel(x, out, scales, SIZE: tl.constexpr, COLUMNS: tl.constexpr, NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    values = tl.load(x + row * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-30)
    tl.store(scales + row, peak * (1.0 / 448.0))
    tl.store(out + row * SIZE + column, _fp8_bits(values * tl.div_rn(448.0, peak), NATIVE), mask=column < SIZE)


@triton.jit
def quantize_kernel(x, out, inverse, size, TILE: tl.constexpr, NATIVE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    values = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out + place, _fp8_bits(values * inverse, NATIVE), mask=place < size)


@triton.jit
def _fp8_bits(values, NATIVE: tl.constexpr):
    """Triton's interpreter truncates, and older GPUs have no such cast: there, the cast is done with integers."""
    if NATIVE:
        bits = tl.clamp(values, -448.0, 448.0).to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        bits = narrow(values, "fp8_e4m3")
    return tl.where(values == values, bits, NAN_BITS)
