"""The product of any number of rows with a weight whose bits do not depend on how many rows there are.

A library chooses another kernel for another number of rows, and may split the columns among programs: then a row's sum
is made in another order. Here one program adds up the columns of a row in order, with one kind of tensor-core
instruction (on Hopper: `wgmma` of 64 rows and 16 columns) whatever the tile, as He et al. do ("Defeating
Nondeterminism in LLM Inference", 2025). Tiles differ in their numbers of rows, which change the order of nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.dot_rows import Tile, dot_rows


@dataclass(frozen=True, slots=True)
class RowsTile:
    """How many rows of x a program takes, and how it takes the weight."""

    block_m: int
    weight: Tile


FEW: Final = RowsTile(64, Tile(32, 128, 5, 4))  # many programs, to read a weight at the memory's speed
MANY: Final = RowsTile(128, Tile(128, 64, 4, 8))
WIDE: Final = RowsTile(16, Tile(32, 16, 3, 4))  # float32 is for comparisons
BLOCKS_A_GROUP: Final = 8  # of rows of x that share what is in the L2 cache


def choose_tile(num_rows: int, dtype: torch.dtype) -> RowsTile:
    """Return the tile for so many rows of x."""
    if dtype == torch.float32:
        return WIDE
    return FEW if num_rows <= FEW.block_m else MANY


def fixed_gemm(x: Tensor, weight: Tensor, out: Tensor, tile: RowsTile | None = None) -> None:
    """`x [m, k] @ weight [n, k]^T -> out [m, n]`, all contiguous and of one type; added up in float32.

    The number of rows chooses the `tile` if it is None; in two bytes, each gives the same bits.
    """
    (m, k), n = x.shape, len(weight)
    assert (weight.shape, out.shape) == ((n, k), (m, n)), (x.shape, weight.shape, out.shape)
    assert x.dtype == weight.dtype == out.dtype, (x.dtype, weight.dtype, out.dtype)
    assert all(tensor.is_contiguous() for tensor in (x, weight, out))
    if not m:
        return
    tile = tile or choose_tile(m, x.dtype)
    with torch.cuda.device_of(x):
        fixed_gemm_kernel[(cdiv(m, tile.block_m) * cdiv(n, tile.weight.block_n),)](
            x,
            weight,
            out,
            m,
            n,
            **tile.weight.constants(tile.block_m, k),
            GROUP=BLOCKS_A_GROUP,
            num_warps=tile.weight.num_warps,
            num_stages=tile.weight.num_stages,
        )


@triton.jit(do_not_specialize=["m"])
def fixed_gemm_kernel(
    x,
    weight,
    out,
    m,
    n,
    K: tl.constexpr,
    STEPS: tl.constexpr,  # of BLOCK_K columns each
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_a_group = GROUP * tl.cdiv(n, BLOCK_N)
    first = tl.program_id(0) // tiles_a_group * GROUP
    height = tl.minimum(tl.cdiv(m, BLOCK_M) - first, GROUP)
    row = (first + tl.program_id(0) % tiles_a_group % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    number = tl.program_id(0) % tiles_a_group // height * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    of_x = x + row.to(tl.int64)[:, None] * K + column[None, :]
    of_weight = weight + tl.minimum(number, n - 1).to(tl.int64)[:, None] * K + column[None, :]
    total = dot_rows(of_x, of_weight, (row < m)[:, None], column, K, STEPS, EVEN)
    place = out + row.to(tl.int64)[:, None] * n + number[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < m)[:, None] & (number < n)[None, :])
