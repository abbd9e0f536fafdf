"""A weight of integers in four or eight bits, as GPUs keep it, and its way back to numbers.

A word of 16 bits has the codes of columns that are a *part* apart: 32 columns, or 16 where a scale has no more. A
*strip* is as many columns as a row's words of one part have codes of: four parts, or two. Its rows lie behind each
other: a tile of rows is one stretch of memory. Scales, and mins, of a strip's rows lie behind each other, too. So a
product takes each part by itself, with one scale a row.

Rule: codes and scales are kept as they are stored, but for scales whose type `integer_layout.py` widens. What is
expanded has the values of `QuantizedArray.dequantize`, rounded to the states' type once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.integer_layout import IntegerLayout, layout_of
from diptych.kernels.quantized import Array, QuantizedArray

WIDE_MIDDLE: Final = 128  # codes in eight bits are kept with a sign
WIDEN_ROWS: Final = 32  # of a program


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """A weight `[n, k]`; columns are filled up with zeros to whole strips."""

    layout: IntegerLayout
    words: Tensor  # int16 [num_strips, n, part]
    scales: Tensor  # [.., n]: float32, a row for each group; or int32, a row for each two groups in float16
    mins: Tensor | None  # like scales
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[1], self.k

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes * (1 if self.mins is None else 2)

    @staticmethod
    def of(array: QuantizedArray, device: torch.device) -> IntegerMatrix:
        """Lay out what has a layout, in memory of `device`."""
        layout, k = layout_of(array), array.shape[1]
        assert layout is not None, array.format
        codes, mins = _stored_codes(array, layout, device)
        factors = [_factors(each, layout, k, device) for each in (array.scales, mins) if each is not None]
        words = words_of(codes, layout.bits, layout.part)
        return IntegerMatrix(layout, words, factors[0], factors[1] if len(factors) > 1 else None, k)


def _stored_codes(array: QuantizedArray, layout: IntegerLayout, device: torch.device) -> tuple[Tensor, Array | None]:
    """Return codes `[n, k]`, uint8, and mins. Large codes in eight bits lose their middle to the mins."""
    codes = torch.from_numpy(array.codes.view(np.uint8)).to(device)
    if array.mins is None or layout.bits == 4:
        return codes + layout.zero & 15 if layout.bits == 4 else codes, array.mins
    if int(codes.max()) < WIDE_MIDDLE:
        return codes, array.mins
    assert array.scales is not None
    return codes - WIDE_MIDDLE, array.mins.astype(np.float32) + WIDE_MIDDLE * array.scales.astype(np.float32)


def words_of(codes: Tensor, bits: int, part: int) -> Tensor:
    """Put `codes [n, k]`, uint8 and one a byte, into words: int16 `[num_strips, n, part]`, filled up with zeros."""
    (n, k), strip = codes.shape, 16 // bits * part
    num_strips = cdiv(k, strip)
    filled = codes if k % strip == 0 else torch.nn.functional.pad(codes, (0, num_strips * strip - k))
    parts = filled.view(n, num_strips, 16 // bits, part).permute(2, 1, 0, 3)
    low, high = (parts[0] | parts[1] << 4, parts[2] | parts[3] << 4) if bits == 4 else (parts[0], parts[1])
    return torch.stack([low, high], dim=-1).view(torch.int16)[..., 0]


def _factors(factors: Array, layout: IntegerLayout, k: int, device: torch.device) -> Tensor:
    """Put groups before rows, and fill up with zeros to whole strips."""
    wide = torch.from_numpy(np.ascontiguousarray(factors)).to(device).T
    wide = torch.nn.functional.pad(wide, (0, 0, 0, layout.num_factors(k) - len(wide)))
    if not layout.is_half:
        return wide.float().contiguous()
    pairs = wide.half().reshape(-1, 2, wide.shape[1]).transpose(1, 2).contiguous()
    return pairs.view(torch.int32)[..., 0]


def widen(matrix: IntegerMatrix, rows: slice | Tensor, out: Tensor) -> None:
    """Write rows of the weight, expanded, to `out [num_rows, k]`, of any float type and contiguous.

    `rows`: some behind each other, or their numbers, int64. Allocates nothing, and can be recorded.
    """
    ids = None if isinstance(rows, slice) else rows
    first = rows.start if isinstance(rows, slice) else 0
    n, k = matrix.shape
    assert out.shape[1] == k, (out.shape, matrix.shape)
    assert out.is_contiguous(), out.stride()
    if not len(out):
        return
    with torch.cuda.device_of(out):
        widen_kernel[(cdiv(len(out), WIDEN_ROWS), len(matrix.words))](
            matrix.words,
            matrix.scales,
            matrix.mins,
            ids,
            out,
            first,
            len(out),
            N=n,
            K=k,
            EVEN=k % matrix.layout.strip == 0,
            BLOCK=WIDEN_ROWS,
            HAS_IDS=ids is not None,
            **matrix.layout.constants(),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["first", "num_rows"])
def widen_kernel(
    words,
    scales,
    mins,
    ids,  # int64 [num_rows] if HAS_IDS
    out,
    first,  # row, otherwise
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    EVEN: tl.constexpr,  # whether all columns of all strips are there
    BLOCK: tl.constexpr,
    HAS_MINS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BITS: tl.constexpr,
    PART: tl.constexpr,
    RUNS: tl.constexpr,
    SPAN: tl.constexpr,
    ZERO: tl.constexpr,
    HALF: tl.constexpr,
):
    PARTS: tl.constexpr = 16 // BITS
    number, strip, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.arange(0, PART)
    there = number < num_rows
    in_order = first + tl.minimum(number, num_rows - 1)
    row = tl.load(ids + number, mask=there, other=0) if HAS_IDS else in_order
    bits = tl.load(words + (strip.to(tl.int64) * N + row)[:, None] * PART + column[None, :])
    place = out + number.to(tl.int64)[:, None] * K + (strip * PARTS * PART + column)[None, :]
    for part in tl.static_range(PARTS):
        scale = factor(scales, strip, part * RUNS // PARTS, row, N, RUNS, SPAN, HALF)
        values = code_of(bits, part, BITS, ZERO).to(tl.float32) * scale[:, None]
        if HAS_MINS:
            values += factor(mins, strip, part * RUNS // PARTS, row, N, RUNS, SPAN, HALF)[:, None]
        inside = there[:, None] if EVEN else there[:, None] & (strip * PARTS * PART + part * PART + column < K)[None, :]
        tl.store(place + part * PART, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def code_of(bits, PLACE: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    """Return the codes of a part of words, int32."""
    if BITS == 4:
        return (bits.to(tl.int32) >> (4 * PLACE) & 15) - ZERO
    else:
        return bits.to(tl.int32) << (24 - 8 * PLACE) >> 24


@triton.jit
def factor(
    factors, strip, RUN: tl.constexpr, row, N: tl.constexpr, RUNS: tl.constexpr, SPAN: tl.constexpr, HALF: tl.constexpr
):
    """Return the scales, or mins, `[rows]` in float32 of a strip's run of columns."""
    if HALF:
        word = tl.load(factors + strip.to(tl.int64) * (RUNS // 2 * N) + row + RUN // 2 * N)
        return (word >> (RUN % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif RUNS > 0:
        return tl.load(factors + strip.to(tl.int64) * (RUNS * N) + row + RUN * N)
    elif SPAN > 0:
        return tl.load(factors + (strip // SPAN).to(tl.int64) * N + row)
    else:
        return tl.load(factors + row)
