"""Products of 1 to 4 rows with a weight in FP8: what a decode step of few requests multiplies, bound by memory.

Every program quantises all of x for itself, by `codes_of`, beside the loads of its rows of the weight: a step has no
launch for it. The arithmetic is that of the ordinary cores; a weight goes from memory to registers, and each is widened
once. Many small programs share a multiprocessor, so that some load while others add up.
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

MAX_ROWS: Final = 4


@dataclass(frozen=True, slots=True)
class Strip:
    """What a program reads at once of a weight."""

    block_n: int  # rows
    columns: int
    num_warps: int

    def constants(self, weight: Fp8Matrix, m: int) -> dict[str, int]:
        """Return what a kernel is compiled with for `m` rows of x."""
        k = weight.shape[1]
        columns = max(GROUP, min(self.columns, power_of_two(k)))
        strip = {"BLOCK_N": self.block_n, "TILE": columns, "STEPS": cdiv(k, columns), "EVEN": k % columns == 0}
        return {"K": k, "M": power_of_two(m), **strip, "GROUP": weight.group, "PITCH": weight.pitch}


STRIPS: Final = {1: Strip(4, 2048, 4), 2: Strip(4, 1024, 4), 4: Strip(4, 1024, 4)}  # by rows of x


def fp8_gemv(x: Tensor, weight: Fp8Matrix, out: Tensor, strip: Strip | None = None) -> None:
    """`x [m, k] @ weight [n, k]^T -> out [m, n]`, m from 1 to 4, whose rows may be parts of longer ones.

    x is quantised as `quantize_rows` does it. Added up in float32.
    """
    (m, k), n = x.shape, weight.shape[0]
    _check(x, weight, out, (m, n))
    strip = strip or STRIPS[power_of_two(m)]
    with torch.cuda.device_of(x):
        fp8_gemv_kernel[(cdiv(n, strip.block_n),)](
            x,
            pointer(weight.codes),
            weight.scales,
            out,
            m,
            n,
            out.stride(0),
            **strip.constants(weight, m),
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=strip.num_warps,
        )


def fp8_gated_gemv(
    x: Tensor, weight: Fp8Matrix, out: Tensor, activation: Activation, strip: Strip | None = None
) -> None:
    """`activation(x @ gates^T) * (x @ ups^T) -> out [m, ffn_size]`, m from 1 to 4, contiguous.

    `weight [2 * ffn_size, k]` has the gates first. Gates and ups are rounded as if they were stored.
    """
    m, ffn_size = len(x), weight.shape[0] // 2
    _check(x, weight, out, (m, ffn_size))
    assert out.is_contiguous(), out.stride()
    strip = strip or STRIPS[power_of_two(m)]
    with torch.cuda.device_of(x):
        fp8_gated_gemv_kernel[(cdiv(ffn_size, strip.block_n),)](
            x,
            pointer(weight.codes),
            weight.scales,
            out,
            m,
            FFN_SIZE=ffn_size,
            ACTIVATION=activation,
            **strip.constants(weight, m),
            COMPILED=not triton.knobs.runtime.interpret,
            num_warps=strip.num_warps,
        )


def _check(x: Tensor, weight: Fp8Matrix, out: Tensor, shape: tuple[int, int]) -> None:
    assert 1 <= len(x) <= MAX_ROWS, x.shape
    assert (x.shape[1], out.shape) == (weight.shape[1], shape), (x.shape, weight.shape, out.shape)
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    assert x.is_contiguous(), x.stride()
    assert out.stride(1) == 1, out.stride()


@triton.jit(do_not_specialize=["m"])
def fp8_gemv_kernel(
    x,
    codes,
    scales,
    out,
    m,
    n,
    out_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    PITCH: tl.constexpr,
    COMPILED: tl.constexpr,
):
    number = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # of rows of the weight
    inside = tl.minimum(number, n - 1)
    largest = largest_of_rows(x, m, K, M, TILE, STEPS, GROUP)
    total = products(x, codes, scales, inside, largest, m, K, M, TILE, STEPS, EVEN, GROUP, PITCH, COMPILED)
    row = tl.arange(0, M)[:, None]
    place = out + row.to(tl.int64) * out_stride + number[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < m) & (number < n)[None, :])


@triton.jit(do_not_specialize=["m"])
def fp8_gated_gemv_kernel(
    x,
    codes,
    scales,
    out,
    m,
    FFN_SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # gates, and as many ups
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    PITCH: tl.constexpr,
    COMPILED: tl.constexpr,
):
    number = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(number, FFN_SIZE - 1)
    largest = largest_of_rows(x, m, K, M, TILE, STEPS, GROUP)
    gate = products(x, codes, scales, inside, largest, m, K, M, TILE, STEPS, EVEN, GROUP, PITCH, COMPILED)
    inside += FFN_SIZE
    up = products(x, codes, scales, inside, largest, m, K, M, TILE, STEPS, EVEN, GROUP, PITCH, COMPILED)
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.arange(0, M)[:, None]
    place = out + row * FFN_SIZE + number[None, :]
    mask = (row < m) & (number < FFN_SIZE)[None, :]
    tl.store(place, gated(gate.to(dtype), up.to(dtype), ACTIVATION), mask=mask)


@triton.jit
def largest_of_rows(
    x, m, K: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr
):
    """Return the largest magnitude of each row, `[M]`; where groups have scales of their own, nothing of use."""
    row, column = tl.arange(0, M), tl.arange(0, TILE)
    largest = tl.zeros((M,), tl.float32)
    if GROUP == 0:
        for step in tl.static_range(STEPS):
            at = column + step * TILE
            there = (row < m)[:, None] & (at < K)[None, :]
            values = tl.load(x + row[:, None] * K + at[None, :], mask=there, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(values.to(tl.float32)), axis=1))
    return largest


@triton.jit
def products(
    x,
    codes,
    scales,
    number,  # [BLOCK_N], of rows of the weight
    largest,  # [M], of rows of x, where GROUP is 0
    m,
    K: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    PITCH: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Return the products `[M, BLOCK_N]` of each row of x with some rows of the weight."""
    block_n: tl.constexpr = number.shape[0]
    row, column = tl.arange(0, M), tl.arange(0, TILE)
    of_codes = codes + number.to(tl.int64)[:, None] * K + column[None, :]
    total = tl.zeros((M, block_n, TILE), tl.float32)
    for step in tl.static_range(STEPS):
        at = column + step * TILE
        if EVEN:
            weights = tl.load(of_codes + step * TILE)
        else:
            weights = tl.load(of_codes + step * TILE, mask=(at < K)[None, :], other=0.0)
        there = (row < m)[:, None] & (at < K)[None, :]
        values = tl.load(x + row[:, None] * K + at[None, :], mask=there, other=0.0).to(tl.float32)
        if GROUP == 0:
            values = numbers_of(codes_of(values, largest[:, None], COMPILED), COMPILED)
        else:
            values = in_groups(values, scales, number, step * (TILE // GROUP), K, GROUP, PITCH, COMPILED)
        total += numbers_of(weights, COMPILED)[None, :, :] * values[:, None, :]
    result = tl.sum(total, axis=2)
    if GROUP == 0:
        result *= scale_of(largest)[:, None] * tl.load(scales + number)[None, :]
    return result


@triton.jit
def in_groups(
    values,  # [M, TILE]
    scales,
    number,  # [BLOCK_N], of rows of the weight that share their scales
    first,  # group
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PITCH: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Return numbers quantised in groups, with their scales and those of the weight."""
    groups: tl.constexpr = values.shape[1] // GROUP
    grouped = values.reshape(values.shape[0], groups, GROUP)
    largest = tl.max(tl.abs(grouped), axis=2)
    group = first + tl.arange(0, groups)
    of_weight = scales + tl.min(number, axis=0) // GROUP * PITCH + group
    factors = scale_of(largest) * tl.load(of_weight, mask=group * GROUP < K, other=0.0)[None, :]
    numbers = numbers_of(codes_of(grouped, largest[:, :, None], COMPILED), COMPILED) * factors[:, :, None]
    return numbers.reshape(values.shape[0], groups * GROUP)
