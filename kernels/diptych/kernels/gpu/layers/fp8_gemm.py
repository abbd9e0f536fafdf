"""Products with weights in FP8 (e4m3): rows are quantised to e4m3, too, and tensor cores multiply codes with codes.

Scales as in `fp8_matrix.py`: where a row of the weight has one, a row of x has one, too; where blocks of 128 x 128 do,
128 columns of a row of x (DeepSeek-V3, arXiv:2412.19437, section 3.3). `fp8_gemm` chooses by the number of rows: few
are multiplied by `fp8_gemv`, some by the kernel here, which streams the weight through shared memory, and many by
cuBLAS, or by the kernel here where that has no such product. Rule: whoever multiplies, codes and scales are the same,
and sums are in float32; cuBLAS lets Hopper's tensor cores add up all columns of a scale, in fewer bits.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.dot_rows import Tile
from diptych.kernels.gpu.layers.fp8_gemv import fp8_gemv
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix
from diptych.kernels.gpu.layers.fp8_rows import GROUP, Fp8Rows, numbers_of, pointer, quantize_rows

SOME_ROWS: Final = 64  # up to these, weights are streamed by the kernel here
BLOCKS: Final = (16, 32, 64, 128)  # rows of a program
MIN_PROGRAMS: Final = 96
ALIGNMENT: Final = 16  # cuBLAS: of both sides of a weight
GROUPS_ALIGNMENT: Final = 512  # of the columns of one with blocks
HOPPER: Final = 9  # major capability of GPUs for which cuBLAS multiplies with blocks
EVEN_ROWS: Final = 8  # cuBLAS: multiples of rows that it multiplies with blocks
TILES: Final = {16: Tile(16, 512, 5, 4), 32: Tile(32, 256, 6, 4), 64: Tile(64, 256, 6, 4), 128: Tile(128, 256, 4, 4)}
PRECISE_COLUMNS: Final = tl.constexpr(128)  # that tensor cores add up by themselves, in fewer bits than float32 has
WIDE_TILE: Final = Tile(128, GROUP, 4, 8)  # for more than `SOME_ROWS`


def fp8_gemm(x: Tensor, weight: Fp8Matrix, out: Tensor) -> None:
    """`x [m, k] @ weight [n, k]^T -> out [m, n]`, whose rows may be parts of longer ones; x is contiguous."""
    if not len(x):
        return
    if len(x) == 1:
        fp8_gemv(x, weight, out)
        return
    if len(x) <= SOME_ROWS or not has_library(weight, out):
        streamed_gemm(quantize_rows(x, weight.group), weight, out)
        return
    even = len(x) // EVEN_ROWS * EVEN_ROWS if weight.group else len(x)
    library_gemm(quantize_rows(x[:even], weight.group), weight, out[:even])
    fp8_gemm(x[even:], weight, out[even:])


def has_library(weight: Fp8Matrix, out: Tensor) -> bool:
    """Whether cuBLAS has such a product."""
    n, k = weight.shape
    is_even = n % (weight.group or ALIGNMENT) == 0 == k % (GROUPS_ALIGNMENT if weight.group else ALIGNMENT)
    if not (out.is_cuda and out.dtype == torch.bfloat16 and out.is_contiguous() and is_even):
        return False
    return not weight.group or torch.cuda.get_device_capability(out.device)[0] == HOPPER


def library_gemm(rows: Fp8Rows, weight: Fp8Matrix, out: Tensor) -> None:
    """Multiply by what torch has; see `has_library`."""
    torch._scaled_mm(
        rows.codes,
        weight.codes.T,
        scale_a=rows.scales,
        scale_b=weight.scales.T,
        out_dtype=out.dtype,
        use_fast_accum=not weight.group,
        out=out,
    )


def choose_block(m: int) -> int:
    """Return how many of `m` rows a program multiplies."""
    return next((block for block in BLOCKS if block >= m), BLOCKS[-1])


def choose_tile(m: int, n: int, group: int) -> Tile:
    """Return the tile for `m` rows and a weight of `n`: the largest block of its rows that keeps the GPU busy."""
    if m > SOME_ROWS:
        return WIDE_TILE
    block_n = next((block for block in sorted(TILES, reverse=True) if cdiv(n, block) >= MIN_PROGRAMS), min(TILES))
    tile = TILES[block_n]
    return Tile(block_n, GROUP, min(8, tile.num_stages * tile.block_k // GROUP), tile.num_warps) if group else tile


def streamed_gemm(rows: Fp8Rows, weight: Fp8Matrix, out: Tensor, tile: Tile | None = None) -> None:
    """Multiply any number of rows by any weight."""
    (m, k), n = rows.codes.shape, weight.shape[0]
    tile, block_m = tile or choose_tile(m, n, weight.group), choose_block(m)
    assert (weight.shape, out.shape) == ((n, k), (m, n)), (rows.codes.shape, weight.shape, out.shape)
    assert out.stride(1) == 1, out.stride()
    with torch.cuda.device_of(out):
        fp8_gemm_kernel[(cdiv(m, block_m), cdiv(n, tile.block_n))](
            pointer(rows.codes),
            rows.scales,
            pointer(weight.codes),
            weight.scales,
            out,
            m,
            n,
            out.stride(0),
            **tile.constants(block_m, k),
            GROUP=weight.group,
            PITCH=weight.pitch,
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def reference_fp8_gemm(rows: Fp8Rows, weight: Fp8Matrix) -> Tensor:
    """Return the product in float64."""
    return rows.dequantize().double() @ weight.dequantize().double().T


@triton.jit(do_not_specialize=["m"])
def fp8_gemm_kernel(
    x,
    x_scales,
    codes,
    scales,
    out,
    m,
    n,
    out_stride,
    K: tl.constexpr,
    STEPS: tl.constexpr,  # of BLOCK_K columns each
    EVEN: tl.constexpr,  # whether the steps end where the columns do
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # GROUP if that is not 0
    GROUP: tl.constexpr,
    PITCH: tl.constexpr,
    COMPILED: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # neighbours share rows of the weight, which are more
    number = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # of a row of the weight
    column, of_weight = tl.arange(0, BLOCK_K), tl.minimum(number, n - 1)
    of_x = x + tl.minimum(row, m - 1).to(tl.int64)[:, None] * K + column[None, :]
    of_codes = codes + of_weight.to(tl.int64)[:, None] * K + column[None, :]
    of_rows = x_scales + tl.minimum(row, m - 1)
    of_scales = scales + of_weight // (GROUP if GROUP else 1) * PITCH
    coming, also_coming = tl.load(of_rows), tl.load(of_scales)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(STEPS):
        if EVEN:
            rows, weights = tl.load(of_x), tl.load(of_codes)
        else:
            inside = (column + step * BLOCK_K < K)[None, :]
            rows, weights = tl.load(of_x, mask=inside, other=0.0), tl.load(of_codes, mask=inside, other=0.0)
        if GROUP:
            factors = coming[:, None] * also_coming[None, :]
            following = tl.minimum(step + 1, STEPS - 1)  # a step ahead, or each would wait for them
            coming, also_coming = tl.load(of_rows + following * m), tl.load(of_scales + following)
            total += product(rows, weights, tl.zeros_like(total), COMPILED) * factors
        else:
            total = product(rows, weights, total, COMPILED)
        of_x += BLOCK_K
        of_codes += BLOCK_K
    if GROUP == 0:
        total *= coming[:, None] * also_coming[None, :]
    place = out + row.to(tl.int64)[:, None] * out_stride + number[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < m)[:, None] & (number < n)[None, :])


@triton.jit
def product(rows, weights, total, COMPILED: tl.constexpr):
    """Return `total` and the products of codes."""
    if COMPILED:
        return tl.dot(rows, weights.T, total, max_num_imprecise_acc=PRECISE_COLUMNS)
    else:
        return tl.dot(numbers_of(rows, COMPILED), numbers_of(weights, COMPILED).T, total, input_precision="ieee")
