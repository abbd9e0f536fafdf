"""The product of one row with a weight in FP8: what a decode step of one request multiplies, bound by memory.

Every program quantises all of x for itself, by `codes_of`, while its first rows of the weight are on their way: a step
has no launch for it. The arithmetic is that of the ordinary cores: a weight goes from memory to registers. Many small
programs share a multiprocessor, so that some load while others add up. Rule: as `fp8_gemm`, of which this is a case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv, power_of_two
from diptych.kernels.gpu.layers.activations import Activation, gated
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix
from diptych.kernels.gpu.layers.fp8_rows import GROUP, codes_of, numbers_of, pointer, scale_of


@dataclass(frozen=True, slots=True)
class Strip:
    """What a program has of a weight, and how much of it is on its way at once."""

    block_n: int  # rows; of gates, and of ups
    columns: int  # of a step
    num_warps: int

    def constants(self, k: int, group: int, pitch: int) -> dict[str, int]:
        """Return what a kernel is compiled with for a weight of `k` columns; `group` and `pitch`: see `Fp8Matrix`."""
        columns = max(GROUP, min(self.columns, power_of_two(k)))
        strip = {"BLOCK_N": self.block_n, "TILE": columns, "STEPS": cdiv(k, columns)}
        return {"K": k, **strip, "GROUP": group, "PITCH": pitch}


STRIP: Final = Strip(4, 4096, 4)
LONG_STRIP: Final = Strip(8, 512, 4)  # more rows for each that x is quantised
LONG: Final = 8192  # columns
GATED_STRIP: Final = Strip(2, 4096, 4)


def choose_strip(k: int) -> Strip:
    """Return the strip for a weight of `k` columns."""
    return LONG_STRIP if k > LONG else STRIP


def fp8_gemv(x: Tensor, weight: Fp8Matrix, out: Tensor, strip: Strip | None = None) -> None:
    """`x [1, k] @ weight [n, k]^T -> out [1, n]`. x is quantised as `quantize_rows` does it."""
    n, k = weight.shape
    strip = strip or choose_strip(k)
    assert (x.shape, out.shape) == ((1, k), (1, n)), (x.shape, weight.shape, out.shape)
    _check(x, out)
    with torch.cuda.device_of(x):
        fp8_gemv_kernel[(cdiv(n, strip.block_n),)](
            x,
            pointer(weight.codes),
            weight.scales,
            out,
            n,
            **strip.constants(k, weight.group, weight.pitch),
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=strip.num_warps,
        )


def can_gate(weight: Fp8Matrix) -> bool:
    """Whether `fp8_gated_gemv` is meant to multiply by the weight: it has no blocks, and gates in whole strips."""
    return not weight.group and weight.shape[0] // 2 % GATED_STRIP.block_n == 0


def fp8_gated_gemv(
    x: Tensor, weight: Fp8Matrix, out: Tensor, activation: Activation, strip: Strip = GATED_STRIP
) -> None:
    """`activation(x @ gates^T) * (x @ ups^T) -> out [1, ffn_size]`.

    `weight [2 * ffn_size, k]` has the gates first. Gates and ups are rounded as if they were stored.
    """
    ffn_size, k = weight.shape[0] // 2, weight.shape[1]
    assert (x.shape, out.shape) == ((1, k), (1, ffn_size)), (x.shape, weight.shape, out.shape)
    assert ffn_size % strip.block_n == 0, weight.shape
    _check(x, out)
    with torch.cuda.device_of(x):
        fp8_gated_gemv_kernel[(ffn_size // strip.block_n,)](
            x,
            pointer(weight.codes),
            weight.scales,
            out,
            FFN_SIZE=ffn_size,
            ACTIVATION=activation,
            **strip.constants(k, weight.group, weight.pitch),
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=strip.num_warps,
        )


def _check(x: Tensor, out: Tensor) -> None:
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    assert x.stride(1) == out.stride(1) == 1, (x.stride(), out.stride())


@triton.jit
def fp8_gemv_kernel(
    x,
    codes,
    scales,
    out,
    n,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    PITCH: tl.constexpr,
    COMPILED: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(row, n - 1)
    first = codes_at(codes, inside, 0, K, TILE)
    largest = largest_of_row(x, K, TILE, STEPS, GROUP)
    total = sums(first, x, codes, scales, inside, largest, K, TILE, STEPS, GROUP, PITCH, COMPILED)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < n)


@triton.jit
def fp8_gated_gemv_kernel(
    x,
    codes,
    scales,
    out,
    FFN_SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    PITCH: tl.constexpr,
    COMPILED: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, also_first = codes_at(codes, row, 0, K, TILE), codes_at(codes, row + FFN_SIZE, 0, K, TILE)
    largest = largest_of_row(x, K, TILE, STEPS, GROUP)
    gate = sums(first, x, codes, scales, row, largest, K, TILE, STEPS, GROUP, PITCH, COMPILED)
    up = sums(also_first, x, codes, scales, row + FFN_SIZE, largest, K, TILE, STEPS, GROUP, PITCH, COMPILED)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + row, gated(gate.to(dtype), up.to(dtype), ACTIVATION))


@triton.jit
def codes_at(codes, row, step, K: tl.constexpr, TILE: tl.constexpr):
    """Load a step's columns of some rows of the weight."""
    column = step * TILE + tl.arange(0, TILE)
    place = codes + row.to(tl.int64)[:, None] * K + column[None, :]
    if K % TILE == 0:
        return tl.load(place)
    else:
        return tl.load(place, mask=(column < K)[None, :], other=0.0)


@triton.jit
def largest_of_row(x, K: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr):
    """Return the largest magnitude of x; nothing of use where groups have scales of their own."""
    largest = 0.0
    if GROUP == 0:
        seen = tl.zeros((TILE,), tl.float32)
        for step in range(STEPS):
            column = step * TILE + tl.arange(0, TILE)
            seen = tl.maximum(seen, tl.abs(tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)))
        largest = tl.max(seen, axis=0)
    return largest


@triton.jit
def sums(
    weights,  # [BLOCK_N, TILE], of the first step
    x,
    codes,
    scales,
    row,  # [BLOCK_N], of the weight
    largest,  # of x, where GROUP is 0
    K: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    PITCH: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Return the products of x with some rows of the weight, `[BLOCK_N]`."""
    total = tl.zeros((row.shape[0], TILE), tl.float32)
    for step in range(STEPS):
        coming = weights
        if STEPS > 1:
            coming = codes_at(codes, row, tl.minimum(step + 1, STEPS - 1), K, TILE)
        column = step * TILE + tl.arange(0, TILE)
        values = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
        if GROUP == 0:
            values = numbers_of(codes_of(values, largest, COMPILED), COMPILED)
        else:
            of_block = scales + tl.min(row, axis=0) // GROUP * PITCH + step * (TILE // GROUP)
            values = in_groups(values, of_block, K - step * TILE, GROUP, COMPILED)
        total += numbers_of(weights, COMPILED) * values[None, :]
        weights = coming
    result = tl.sum(total, axis=1)
    if GROUP == 0:
        result *= scale_of(largest) * tl.load(scales + row)
    return result


@triton.jit
def in_groups(values, of_block, num_columns, GROUP: tl.constexpr, COMPILED: tl.constexpr):
    """Return numbers quantised in groups, with their scales and those of the weight's block of rows."""
    groups: tl.constexpr = values.shape[0] // GROUP
    grouped, number = values.reshape(groups, GROUP), tl.arange(0, groups)
    largest = tl.max(tl.abs(grouped), axis=1)
    factors = scale_of(largest) * tl.load(of_block + number, mask=number * GROUP < num_columns, other=0.0)
    numbers = numbers_of(codes_of(grouped, largest[:, None], COMPILED), COMPILED)
    return (numbers * factors[:, None]).reshape(groups * GROUP)
