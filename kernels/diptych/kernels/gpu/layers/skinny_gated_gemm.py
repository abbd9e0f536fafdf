"""The product of a few rows with gates and ups, activated: the first half of a feed-forward network in decode steps.

A program has some gates and the ups that belong to them in one tile, so that products are activated where they are and
never go through memory. Otherwise it is `skinny_gemm`, and has its rule: a row's result is the same beside any others.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.activations import Activation, gated
from diptych.kernels.gpu.layers.dot_rows import Tile, dot_rows
from diptych.kernels.gpu.layers.skinny_gemm import MAX_PROGRAMS, MAX_ROWS, MIN_PROGRAMS

TILES: Final = {128: Tile(128, 128, 3, 4), 64: Tile(64, 256, 2, 4)}  # two of either fit into a multiprocessor
AT_ONCE: Final = 2 * MAX_PROGRAMS


def pays_up_to(ffn_size: int, k: int) -> int:
    """Return for how many rows of x, at most, `skinny_gated_gemm` is meant to multiply a weight `[2 * ffn_size, k]`.

    0 where gates do not come in whole tiles, or the programs do not all run at once.
    """
    block = choose_tile(ffn_size).block_n // 2
    is_even = ffn_size % block == 0 and MIN_PROGRAMS <= ffn_size // block <= AT_ONCE
    return MAX_ROWS if is_even and k % 16 == 0 else 0


def choose_tile(ffn_size: int) -> Tile:
    """Return the tile for so many gates and ups: the largest that keeps the GPU busy."""
    block_n = next((block for block in TILES if cdiv(2 * ffn_size, block) >= MIN_PROGRAMS), min(TILES))
    return TILES[block_n]


def skinny_gated_gemm(x: Tensor, weight: Tensor, out: Tensor, activation: Activation) -> None:
    """`activation(x @ gates^T) * (x @ ups^T) -> out [m, ffn_size]`, for x `[m, k]` with m at most 16.

    `weight [2 * ffn_size, k]` has the gates first. All are contiguous and of one type of two bytes, `ffn_size` is a
    multiple of half a tile's rows. Added up in float32; gates and ups are rounded as if they were stored.
    """
    (m, k), ffn_size = x.shape, len(weight) // 2
    tile = choose_tile(ffn_size)
    assert 1 <= m <= MAX_ROWS, x.shape
    assert (weight.shape, out.shape) == ((2 * ffn_size, k), (m, ffn_size)), (x.shape, weight.shape, out.shape)
    assert 2 * ffn_size % tile.block_n == 0, weight.shape
    assert x.dtype == weight.dtype == out.dtype, (x.dtype, weight.dtype, out.dtype)
    assert x.dtype.itemsize == 2, x.dtype
    assert all(tensor.is_contiguous() for tensor in (x, weight, out))
    with torch.cuda.device_of(x):
        skinny_gated_gemm_kernel[(2 * ffn_size // tile.block_n,)](
            x,
            weight,
            out,
            m,
            FFN_SIZE=ffn_size,
            ACTIVATION=activation,
            **tile.constants(MAX_ROWS, k),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


@triton.jit(do_not_specialize=["m"])
def skinny_gated_gemm_kernel(
    x,
    weight,
    out,
    m,
    FFN_SIZE: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,  # of BLOCK_K columns each
    EVEN: tl.constexpr,  # whether the steps end where the columns do
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # half of them gates, half of them ups
    BLOCK_K: tl.constexpr,
):
    PAIRS: tl.constexpr = BLOCK_N // 2
    row, part, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    first = tl.program_id(0) * PAIRS
    number = first + part % PAIRS + part // PAIRS * FFN_SIZE  # of a row of the weight
    of_x = x + row[:, None] * K + column[None, :]
    of_weight = weight + number.to(tl.int64)[:, None] * K + column[None, :]
    there = (row < m)[:, None]
    total = dot_rows(of_x, of_weight, there, column, K, STEPS, EVEN).to(out.dtype.element_ty)
    gate, up = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, PAIRS)), (0, 2, 1)))
    place = out + row[:, None] * FFN_SIZE + first + tl.arange(0, PAIRS)[None, :]
    tl.store(place, gated(gate, up, ACTIVATION), mask=there)
