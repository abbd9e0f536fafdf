"""RMS norms: of the residual stream, with what a block adds to it in the same pass, and of the heads of q and k.

One program has one row in registers, so that memory is read and written once. Rule: what is rounded, and when, is as in
`TorchOps` of `diptych.engine.models.arithmetic.ops`: a sum is rounded before it is normed, and a normed value to the
type of the weights before it is multiplied by them (Gemma's are float32, so its values are rounded once, at the end).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv, power_of_two

TILE_NUMBERS: Final = 1024  # of heads
LARGEST_ROW: Final = 32_768  # numbers: 32 a thread of the largest program
NUMBERS_A_WARP: Final = 512  # 16 a thread: two loads of 16 bytes are on their way


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Norm each row of `x` into `out`, both `[num_tokens, size]`; `weight` is `[size]`, of their type or float32.

    `out` may be `x`.
    """
    _check(x, weight, out)
    _launch(rms_norm_kernel, x, weight, out, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Add `delta` to `x` in place; `out` is the norm of the sum. As `rms_norm` otherwise; `out` may be `delta`."""
    _check(x, weight, out, delta)
    _launch(add_rms_norm_kernel, x, delta, weight, out, eps)


def norm_heads(qkv: Tensor, num_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """Norm each query and key in place.

    `qkv` is `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, the weights are `[head_dim]`, of its type or
    float32.
    """
    head_dim = len(q_weight)
    assert qkv.is_contiguous(), qkv.stride()
    assert q_weight.dtype == k_weight.dtype, (q_weight.dtype, k_weight.dtype)
    assert q_weight.shape == k_weight.shape, (q_weight.shape, k_weight.shape)
    assert head_dim == power_of_two(head_dim), head_dim
    all_heads, rest = divmod(qkv.shape[1], head_dim)
    num_normed = (all_heads + num_heads) // 2
    assert rest == 0 < num_heads < num_normed, (qkv.shape, num_heads, head_dim)
    heads = max(1, TILE_NUMBERS // head_dim)
    with torch.cuda.device_of(qkv):
        norm_heads_kernel[(len(qkv), cdiv(num_normed, heads))](
            qkv,
            q_weight,
            k_weight,
            eps,
            NUM_HEADS=num_heads,
            NUM_NORMED=num_normed,
            ROW=qkv.shape[1],
            HEAD_DIM=head_dim,
            HEADS=heads,
        )


def warps(columns: int) -> int:
    """How many warps share a row of so many numbers, a power of 2."""
    return min(32, max(1, columns // NUMBERS_A_WARP))


def _launch(kernel: Any, x: Tensor, *others: Tensor | float) -> None:
    size = x.shape[1]
    columns = power_of_two(size)
    with torch.cuda.device_of(x):
        kernel[(len(x),)](x, *others, SIZE=size, COLUMNS=columns, num_warps=warps(columns))


def _check(x: Tensor, weight: Tensor, *others: Tensor) -> None:
    assert x.ndim == 2, x.shape
    assert x.shape[1] <= LARGEST_ROW, x.shape
    assert weight.shape == x.shape[1:], (weight.shape, x.shape)
    assert all(tensor.is_contiguous() for tensor in (x, weight, *others))
    for other in others:
        assert (other.shape, other.dtype) == (x.shape, x.dtype), (other.shape, x.shape, other.dtype, x.dtype)


@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    start, column = tl.program_id(0).to(tl.int64) * SIZE, tl.arange(0, COLUMNS)
    values = tl.load(x + start + column, mask=column < SIZE, other=0.0).to(tl.float32)
    store_normed(values, weight, out + start, eps, SIZE, COLUMNS)


@triton.jit
def add_rms_norm_kernel(x, delta, weight, out, eps, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    start, column = tl.program_id(0).to(tl.int64) * SIZE, tl.arange(0, COLUMNS)
    values = tl.load(x + start + column, mask=column < SIZE, other=0.0).to(tl.float32)
    added = tl.load(delta + start + column, mask=column < SIZE, other=0.0).to(tl.float32)
    rounded = (values + added).to(x.dtype.element_ty)
    tl.store(x + start + column, rounded, mask=column < SIZE)
    store_normed(rounded.to(tl.float32), weight, out + start, eps, SIZE, COLUMNS)


@triton.jit
def store_normed(values, weight, out, eps, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Norm a row whose numbers from `SIZE` on are 0."""
    column = tl.arange(0, COLUMNS)
    factors = tl.load(weight + column, mask=column < SIZE, other=0.0)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    normed = normed.to(weight.dtype.element_ty).to(tl.float32) * factors.to(tl.float32)
    tl.store(out + column, normed.to(out.dtype.element_ty), mask=column < SIZE)


@triton.jit
def norm_heads_kernel(
    qkv,
    q_weight,
    k_weight,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_NORMED: tl.constexpr,  # heads: queries, then keys
    ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HEAD_DIM)[None, :]
    place = qkv + tl.program_id(0).to(tl.int64) * ROW + head * HEAD_DIM + column
    inside = head < NUM_NORMED
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / HEAD_DIM + eps)
    of_query, of_key = tl.load(q_weight + column).to(tl.float32), tl.load(k_weight + column).to(tl.float32)
    factors = tl.where(head < NUM_HEADS, of_query, of_key)
    normed = normed.to(q_weight.dtype.element_ty).to(tl.float32) * factors
    tl.store(place, normed.to(qkv.dtype.element_ty), mask=inside)
