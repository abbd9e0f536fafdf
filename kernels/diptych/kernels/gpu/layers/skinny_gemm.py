"""The product of a few rows with a weight: what a decode step of 1 to 16 requests multiplies, bound by memory.

The weight is streamed once through shared memory in rows of 16-byte copies, several stages deep, while the tensor cores
take what has arrived. `choose_tile` sees to it that nearly every multiprocessor has its part and that enough bytes are
on their way. Rule: the order of additions depends on the weight's shape alone, so that a row's result is the same
beside any other rows.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.dot_rows import Tile, dot_rows

MAX_ROWS: Final = 16  # the tensor cores' smallest tile
MIN_PROGRAMS: Final = 120  # an H100 or H200 has 132 multiprocessors; some idle ones cost no bandwidth
MAX_PROGRAMS: Final = 132
MANY_PROGRAMS: Final = 8 * MAX_PROGRAMS  # how the last of them come out hardly counts
TILES: Final = {16: Tile(16, 256, 6, 4), 32: Tile(32, 256, 5, 4), 64: Tile(64, 128, 5, 4)}  # 64 KiB on the way, or 40


def pays_up_to(n: int, k: int) -> int:
    """Return for how many rows of x, at most, `skinny_gemm` is meant to multiply a weight `[n, k]` in two bytes.

    0 where some multiprocessors had two programs and others one, or many had none: there, cuBLAS is faster.
    """
    programs = cdiv(n, choose_tile(n).block_n)
    is_even = MIN_PROGRAMS <= programs <= MAX_PROGRAMS or programs >= MANY_PROGRAMS
    return MAX_ROWS if is_even and k % 16 == 0 else 0


def choose_tile(n: int) -> Tile:
    """Return the tile for a weight of `n` rows: the largest block of rows that keeps the GPU busy."""
    block_n = next((block for block in sorted(TILES, reverse=True) if cdiv(n, block) >= MIN_PROGRAMS), min(TILES))
    return TILES[block_n]


def skinny_gemm(x: Tensor, weight: Tensor, out: Tensor, tile: Tile | None = None) -> None:
    """`x [m, k] @ weight [n, k]^T -> out [m, n]`, m at most 16, all contiguous and of one type of two bytes.

    Added up in float32. The weight's shape chooses the `tile` if it is None.
    """
    (m, k), n = x.shape, len(weight)
    tile = tile or choose_tile(n)
    assert 1 <= m <= MAX_ROWS, x.shape
    assert (weight.shape, out.shape) == ((n, k), (m, n)), (x.shape, weight.shape, out.shape)
    assert x.dtype == weight.dtype == out.dtype, (x.dtype, weight.dtype, out.dtype)
    assert x.dtype.itemsize == 2, x.dtype
    assert all(tensor.is_contiguous() for tensor in (x, weight, out))
    with torch.cuda.device_of(x):
        skinny_gemm_kernel[(cdiv(n, tile.block_n),)](
            x,
            weight,
            out,
            m,
            n,
            **tile.constants(MAX_ROWS, k),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


@triton.jit(do_not_specialize=["m"])
def skinny_gemm_kernel(
    x,
    weight,
    out,
    m,
    n,
    K: tl.constexpr,
    STEPS: tl.constexpr,  # of BLOCK_K columns each
    EVEN: tl.constexpr,  # whether the steps end where the columns do
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.arange(0, BLOCK_M)
    number = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # of a row of the weight
    column = tl.arange(0, BLOCK_K)
    of_x = x + row[:, None] * K + column[None, :]
    of_weight = weight + tl.minimum(number, n - 1).to(tl.int64)[:, None] * K + column[None, :]
    total = dot_rows(of_x, of_weight, (row < m)[:, None], column, K, STEPS, EVEN)
    place = out + row.to(tl.int64)[:, None] * n + number[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < m)[:, None] & (number < n)[None, :])
