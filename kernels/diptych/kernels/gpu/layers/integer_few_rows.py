"""The product of a few rows with a weight of integers: what a decode step of up to 16 requests multiplies by.

A program has some rows of the weight, and each of its warps a share of their columns: every warp takes the next strip
but so many, and in the end their sums are added up. So as many programs as keep the GPU busy need no memory to meet in,
which costs more than 2 us, and still read long stretches of a weight. Otherwise it is `integer_gemm`, and has its rule:
the order of additions depends on the weight's shape and the tile alone.

Of gates and ups, a program has some gates and the ups that belong to them, and activates their products where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.activations import Activation, gated
from diptych.kernels.gpu.layers.integer_matrix import IntegerMatrix, factor
from diptych.kernels.gpu.layers.integer_words import unpacked
from diptych.kernels.integer_layout import IntegerLayout

BLOCKS: Final = (8, 16, 32)  # rows of x: tensor cores take 8 at least
MAX_ROWS: Final = BLOCKS[-1]
PAYS_UP_TO: Final = 16  # rows: of more, each program reads too much of x
BUSY: Final = 120  # programs that are wanted, of as many multiprocessors as an H100 or H200 has


@dataclass(frozen=True, slots=True)
class FewRowsTile:
    """How a weight is shared out."""

    block_n: int  # rows of the weight of a program
    num_warps: int  # each with a strip at a time
    num_stages: int

    def constants(self, layout: IntegerLayout, m: int, k: int) -> dict[str, int | bool]:
        """Return what a kernel is compiled with that multiplies `m` rows by weights of `k` columns."""
        strips = layout.num_strips(k)
        steps = cdiv(strips, self.num_warps)
        block_m = next(block for block in BLOCKS if m <= block)
        sizes = {"BLOCK_M": block_m, "BLOCK_N": self.block_n, "WARPS": self.num_warps}
        return {"K": k, "STRIPS": strips, "STEPS": steps, "EVEN": k == steps * self.num_warps * layout.strip, **sizes}


def choose_tile(n: int, dtype: torch.dtype) -> FewRowsTile:
    """Return the tile for a weight of `n` rows."""
    if dtype.itemsize > 2:  # for comparisons
        return FewRowsTile(32, 4, 2)
    return FewRowsTile(32 if cdiv(n, 32) >= BUSY else 16, 8, 3)


def integer_few_rows(x: Tensor, matrix: IntegerMatrix, out: Tensor, tile: FewRowsTile | None = None) -> None:
    """`x [m, k] @ weight [n, k]^T -> out [m, n]`, m at most 32, x and out of one type.

    x is contiguous, and so is each row of out. The weight's shape chooses the `tile` if it is None. Allocates nothing,
    and can be recorded.
    """
    assert out.shape == (len(x), matrix.shape[0]), (x.shape, matrix.shape, out.shape)
    _launch(x, matrix, out, tile or choose_tile(matrix.shape[0], x.dtype), activation=None)


def can_gate(matrix: IntegerMatrix, dtype: torch.dtype) -> bool:
    """Whether `integer_few_rows_gated` takes the weight: its gates come in whole tiles."""
    return matrix.shape[0] % choose_tile(matrix.shape[0], dtype).block_n == 0


def integer_few_rows_gated(x: Tensor, matrix: IntegerMatrix, out: Tensor, activation: Activation) -> None:
    """`activation(x @ gates^T) * (x @ ups^T) -> out [m, ffn_size]`; `matrix`, `[2 * ffn_size, k]`, has the gates first.

    Gates and ups are rounded as if they were stored. Otherwise it is `integer_few_rows`.
    """
    n = matrix.shape[0]
    assert out.shape == (len(x), n // 2), (x.shape, matrix.shape, out.shape)
    assert can_gate(matrix, x.dtype), matrix.shape
    _launch(x, matrix, out, choose_tile(n, x.dtype), activation)


def _launch(x: Tensor, matrix: IntegerMatrix, out: Tensor, tile: FewRowsTile, activation: Activation | None) -> None:
    (m, k), (n, columns) = x.shape, matrix.shape
    assert 1 <= m <= MAX_ROWS, x.shape
    assert columns == k, (x.shape, matrix.shape)
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    assert x.is_contiguous(), x.stride()
    assert out.stride(1) == 1, out.stride()
    with torch.cuda.device_of(x):
        integer_few_rows_kernel[(cdiv(n, tile.block_n),)](
            x,
            matrix.words,
            matrix.scales,
            matrix.mins,
            out,
            m,
            out.stride(0),
            N=n,
            ACTIVATION=activation,
            **tile.constants(matrix.layout, m, k),
            **matrix.layout.constants(),
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


@triton.jit(do_not_specialize=["m"])
def integer_few_rows_kernel(
    x,
    words,
    scales,
    mins,
    out,
    m,
    stride,  # of rows of out
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of gates, which ups follow; None: of no product
    K: tl.constexpr,
    STRIPS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,  # whether the last step's strips end where the columns do
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    BITS: tl.constexpr,
    PART: tl.constexpr,
    RUNS: tl.constexpr,
    SPAN: tl.constexpr,
    ZERO: tl.constexpr,
    HALF: tl.constexpr,
    HAS_MINS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Products have three dimensions: warps, rows of the weight, rows of x."""
    PARTS: tl.constexpr = 16 // BITS
    STRIP: tl.constexpr = PARTS * PART
    RUN: tl.constexpr = PARTS // RUNS if RUNS > 0 else PARTS  # parts that have one scale
    WHOLE: tl.constexpr = RUNS == 0 and SPAN == 0  # a row has one scale
    warp, token, column = tl.arange(0, WARPS), tl.arange(0, BLOCK_M), tl.arange(0, PART)[None, None, :]
    PAIRS: tl.constexpr = BLOCK_N // 2
    number = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if ACTIVATION is not None:
        place = tl.arange(0, BLOCK_N)
        number = tl.program_id(0) * PAIRS + place % PAIRS + place // PAIRS * (N // 2)
    row, there = tl.minimum(number, N - 1), (token < m)[None, :, None]
    of_x = x + token.to(tl.int64)[None, :, None] * K + column
    of_words = words + row[None, :, None] * PART + column
    ones = tl.full((WARPS, BLOCK_N, PART), 1.0, x.dtype.element_ty)
    total = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
    level = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)  # the sum of the states, if there are mins
    if not WHOLE:
        next_scales = factors_of(scales, warp, row, N, STRIPS, RUNS, SPAN, HALF)
        if HAS_MINS:
            next_mins = factors_of(mins, warp, row, N, STRIPS, RUNS, SPAN, HALF)
    for step in range(STEPS):
        wanted = step * WARPS + warp
        if not WHOLE:  # what is read here is needed in the next step: these loads have no stages
            these_scales = next_scales
            next_scales = factors_of(scales, wanted + WARPS, row, N, STRIPS, RUNS, SPAN, HALF)
            if HAS_MINS:
                these_mins = next_mins
                next_mins = factors_of(mins, wanted + WARPS, row, N, STRIPS, RUNS, SPAN, HALF)
        strip = wanted if EVEN else tl.minimum(wanted, STRIPS - 1)
        bits = tl.load(of_words + strip.to(tl.int64)[:, None, None] * (N * PART))
        codes = unpacked(bits, x.dtype.element_ty, BITS, ZERO, COMPILED)
        for part in tl.static_range(PARTS):
            first = (wanted * STRIP + part * PART)[:, None, None]
            inside = there if EVEN else there & (first + column < K)
            states = tl.trans(tl.load(of_x + first, mask=inside, other=0.0), (0, 2, 1))
            if WHOLE:
                total = tl.dot(codes[part], states, total, input_precision="ieee")
            elif part % RUN == 0:
                products = tl.dot(codes[part], states, input_precision="ieee")
            else:
                products = tl.dot(codes[part], states, products, input_precision="ieee")
            if HAS_MINS:
                if part % RUN == 0 and not WHOLE:
                    level = tl.dot(ones, states, input_precision="ieee")
                else:
                    level = tl.dot(ones, states, level, input_precision="ieee")
            if part % RUN == RUN - 1 and not WHOLE:
                total += products * these_scales[part // RUN][:, :, None]
                if HAS_MINS:
                    total += level * these_mins[part // RUN][:, :, None]
    result = tl.sum(total, axis=0)
    if WHOLE:
        result *= tl.load(scales + row)[:, None]
        if HAS_MINS:
            result += tl.sum(level, axis=0) * tl.load(mins + row)[:, None]
    of_out = out + token.to(tl.int64)[None, :] * stride
    result = result.to(out.dtype.element_ty)
    if ACTIVATION is None:
        tl.store(of_out + number[:, None], result, mask=(number < N)[:, None] & (token < m)[None, :])
    else:
        gate, up = tl.split(tl.permute(tl.reshape(result, (2, PAIRS, BLOCK_M)), (1, 2, 0)))
        pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
        tl.store(of_out + pair[:, None], gated(gate, up, ACTIVATION), mask=(token < m)[None, :])


@triton.jit
def factors_of(
    factors,
    strip,  # of each warp
    row,
    N: tl.constexpr,
    STRIPS: tl.constexpr,
    RUNS: tl.constexpr,
    SPAN: tl.constexpr,
    HALF: tl.constexpr,
):
    """Return the scales, or mins, of a strip's runs, `[warps, rows]` each; the last strip's of strips behind it."""
    found = ()  # type: tuple[object, ...]
    for run in tl.static_range(RUNS if RUNS > 0 else 1):
        one = (factor(factors, tl.minimum(strip, STRIPS - 1)[:, None], run, row[None, :], N, RUNS, SPAN, HALF),)
        found = found + one
    return found
