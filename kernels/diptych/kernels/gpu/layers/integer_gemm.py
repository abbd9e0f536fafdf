"""The product of rows with a weight of integers in four or eight bits: the codes are read, and none is expanded.

The weight is the left side of a product, as in `mxfp4_experts.py`: codes go from shared memory into the registers in
which tensor cores want them, and become numbers of the states' type there, which holds every code exactly. Several
programs share the columns of a tile of rows; the one that is done last adds up what all have, in the order of the
columns.

Rule: the products of a group are added up in float32 and multiplied by its scale there; a min is multiplied by the sum
of the states. So nothing is rounded but the result. The order of additions depends on the weight's shape and on the
tile alone, not on what other rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.integer_matrix import IntegerMatrix, factor
from diptych.kernels.gpu.layers.integer_words import unpacked
from diptych.kernels.integer_layout import IntegerLayout

BLOCKS: Final = (8, 16, 32, 64)  # rows of x that are multiplied at once
FEW: Final = 16  # rows of x: memory decides
LARGE_BLOCK_N: Final = 128  # rows of the weight of a program, of more rows, if that leaves one for each multiprocessor
SMALL_BLOCK_N: Final = 64
MULTIPROCESSORS: Final = 132  # of an H100 or H200
AT_ONCE_OF_FEW: Final = {4: 896, 8: 448}  # programs that are wanted, by the bits of codes
AT_ONCE: Final = 384
MAX_SPLIT_OF_FEW: Final = 8
MAX_SPLIT: Final = 4
MAX_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class IntegerTile:
    """How a product is shared out."""

    block_m: int  # rows of x of a program
    block_n: int  # rows of the weight
    block_k: int  # columns of a stage: whole strips
    split: int  # programs that share the columns
    num_stages: int
    num_warps: int

    def constants(self, layout: IntegerLayout, k: int) -> dict[str, int | bool]:
        """Return what a kernel is compiled with that multiplies by weights of `k` columns."""
        strips, unroll = layout.num_strips(k), self.block_k // layout.strip
        steps = cdiv(strips, unroll * self.split)
        is_even = k == steps * self.split * self.block_k
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "SPLIT": self.split}
        return {"K": k, "STRIPS": strips, "STEPS": steps, "UNROLL": unroll, "EVEN": is_even} | blocks


def pays_up_to(k: int, layout: IntegerLayout) -> int:
    """Return for how many rows of x, at most, `integer_gemm` is meant to multiply a weight of `k` columns.

    The more scales a strip has to apply to sums, the earlier it takes longer than to widen the weight.
    """
    return MAX_ROWS // max(1, layout.runs) if k % 16 == 0 else FEW


def most_tiles(n: int) -> int:
    """Return how many tiles, at most, a product has whose programs share columns."""
    return cdiv(n, SMALL_BLOCK_N) * cdiv(MAX_ROWS, BLOCKS[-1])


def choose_tile(m: int, n: int, k: int, layout: IntegerLayout, dtype: torch.dtype) -> IntegerTile:
    """Return the tile for `m` rows with a weight `[n, k]`: what was fastest for the shapes of Llama-3-8B."""
    if dtype.itemsize > 2:  # for comparisons
        return IntegerTile(16, 128, layout.strip, 1, 2, 8)
    smallest = BLOCKS[0] if layout.part >= 32 else BLOCKS[1]  # states are read in four bytes a thread, or more
    block_m, block_k = next((each for each in BLOCKS if each >= max(m, smallest)), BLOCKS[-1]), max(128, layout.strip)
    if m > FEW and cdiv(n, LARGE_BLOCK_N) >= MULTIPROCESSORS:
        return IntegerTile(block_m, LARGE_BLOCK_N, block_k, 1, 3, 8)
    programs = cdiv(n, SMALL_BLOCK_N) * cdiv(m, block_m)
    wanted, most = (AT_ONCE_OF_FEW[layout.bits], MAX_SPLIT_OF_FEW) if m <= FEW else (AT_ONCE, MAX_SPLIT)
    split = min(most, max(1, wanted // programs), cdiv(k, block_k))
    return IntegerTile(block_m, SMALL_BLOCK_N, block_k, split, 3, 4)


def integer_gemm(
    x: Tensor, matrix: IntegerMatrix, counters: Tensor, out: Tensor, tile: IntegerTile | None = None
) -> None:
    """`x [m, k] @ weight [n, k]^T -> out [m, n]`, x and out of one type; x is contiguous, and so is each row of out.

    `counters`: int32, zeros before and afterwards, of as many numbers as there are tiles; a product at a time may have
    them. The shapes choose the `tile` if it is None.
    """
    (m, k), (n, columns) = x.shape, matrix.shape
    tile = tile or choose_tile(m, n, k, matrix.layout, x.dtype)
    blocks, groups = cdiv(n, tile.block_n), cdiv(m, tile.block_m)
    assert (columns, out.shape) == (k, (m, n)), (x.shape, matrix.shape, out.shape)
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    assert x.is_contiguous(), x.stride()
    assert out.stride(1) == 1, out.stride()
    assert tile.split == 1 or counters.numel() >= blocks * groups, (counters.shape, blocks, groups)
    partials = x.new_empty(tile.split if tile.split > 1 else 0, m, n, dtype=torch.float32)
    with torch.cuda.device_of(x):
        integer_gemm_kernel[(blocks * tile.split, groups)](
            x,
            matrix.words,
            matrix.scales,
            matrix.mins,
            partials,
            counters,
            out,
            m,
            out.stride(0),
            N=n,
            **tile.constants(matrix.layout, k),
            **matrix.layout.constants(),
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


@triton.jit(do_not_specialize=["m"])
def integer_gemm_kernel(
    x,
    words,
    scales,
    mins,
    partials,  # [SPLIT, m, n], float32
    counters,
    out,
    m,
    stride,  # of rows of out
    N: tl.constexpr,
    K: tl.constexpr,
    STRIPS: tl.constexpr,
    STEPS: tl.constexpr,  # of each program
    UNROLL: tl.constexpr,  # strips of a step
    EVEN: tl.constexpr,  # whether the steps of all programs end where the columns do
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    BITS: tl.constexpr,
    PART: tl.constexpr,
    RUNS: tl.constexpr,
    SPAN: tl.constexpr,
    ZERO: tl.constexpr,
    HALF: tl.constexpr,
    HAS_MINS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Rows of the weight are those of the product: what is unpacked stays in registers, as the tensor cores take it."""
    PARTS: tl.constexpr = 16 // BITS
    STRIP: tl.constexpr = PARTS * PART
    RUN: tl.constexpr = PARTS // RUNS if RUNS > 0 else PARTS  # parts that have one scale
    block, share = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    number, column = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, PART)
    there, row = (token < m)[:, None], tl.minimum(number, N - 1)
    of_x = x + token.to(tl.int64)[:, None] * K + column[None, :]
    of_words = words + row[:, None] * PART + column[None, :]
    ones = tl.full((BLOCK_N, PART), 1.0, x.dtype.element_ty)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    level = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)  # the sum of the states, if there are mins
    WHOLE: tl.constexpr = RUNS == 0 and SPAN == 0  # a row has one scale
    if not WHOLE:
        next_scales = factors_of(scales, share * STEPS, row, N, STRIPS, UNROLL, EVEN, RUNS, SPAN, HALF)
        if HAS_MINS:
            next_mins = factors_of(mins, share * STEPS, row, N, STRIPS, UNROLL, EVEN, RUNS, SPAN, HALF)
    for step in range(share * STEPS, (share + 1) * STEPS):
        if not WHOLE:  # what is read here is needed in the next step: these loads have no stages
            these_scales = next_scales
            next_scales = factors_of(scales, step + 1, row, N, STRIPS, UNROLL, False, RUNS, SPAN, HALF)
            if HAS_MINS:
                these_mins = next_mins
                next_mins = factors_of(mins, step + 1, row, N, STRIPS, UNROLL, False, RUNS, SPAN, HALF)
        for more in tl.static_range(UNROLL):
            wanted = step * UNROLL + more
            strip = wanted if EVEN else tl.minimum(wanted, STRIPS - 1)
            bits = tl.load(of_words + strip.to(tl.int64) * (N * PART))
            codes = unpacked(bits, x.dtype.element_ty, BITS, ZERO, COMPILED)
            for part in tl.static_range(PARTS):
                first = wanted * STRIP + part * PART
                inside = there if EVEN else there & (first + column < K)[None, :]
                states = tl.load(of_x + first, mask=inside, other=0.0).T
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
                    total += products * these_scales[(more * PARTS + part) // RUN][:, None]
                    if HAS_MINS:
                        total += level * these_mins[(more * PARTS + part) // RUN][:, None]
    if WHOLE:
        total *= tl.load(scales + row)[:, None]
        if HAS_MINS:
            total += level * tl.load(mins + row)[:, None]
    inside = (number < N)[:, None] & (token < m)[None, :]
    place = out + token.to(tl.int64)[None, :] * stride + number[:, None]
    if SPLIT == 1:
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)
    else:
        of_share = partials + token.to(tl.int64)[None, :] * N + number[:, None]
        tl.store(of_share + share.to(tl.int64) * m * N, total, mask=inside)
        tl.debug_barrier()  # all threads have stored theirs
        counter = counters + tl.program_id(1) * tl.cdiv(N, BLOCK_N) + block
        if tl.atomic_add(counter, 1) == SPLIT - 1:  # the last
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for _ in range(SPLIT):
                total += tl.load(of_share, mask=inside, other=0.0, cache_modifier=".cg")
                of_share += m.to(tl.int64) * N
            tl.store(place, total.to(out.dtype.element_ty), mask=inside)
            tl.store(counter, 0)


@triton.jit
def factors_of(
    factors,
    step,
    row,
    N: tl.constexpr,
    STRIPS: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    RUNS: tl.constexpr,
    SPAN: tl.constexpr,
    HALF: tl.constexpr,
):
    """Return all scales, or mins, of a step, `[rows]` each."""
    found = ()  # type: tuple[object, ...]
    for more in tl.static_range(UNROLL):
        wanted = step * UNROLL + more
        strip = wanted if EVEN else tl.minimum(wanted, STRIPS - 1)
        for run in tl.static_range(RUNS if RUNS > 0 else 1):
            one = (factor(factors, strip, run, row, N, RUNS, SPAN, HALF),)
            found = found + one
    return found
