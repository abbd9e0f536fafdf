"""Adds up what a token's experts returned. Rule: in order of the experts' numbers, whatever the batch, in float32."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv, power_of_two

TILE_NUMBERS: Final = 1024


def combine_experts(results: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
    """Add up each token's `results [num_assignments, size]` by their shares, in float32, in order of the experts.

    `chosen` (a token's experts differ) and `shares` are `[num_tokens, experts_per_token]`, `out` is `[num_tokens,
    size]`; all are contiguous.
    """
    num_tokens, size = out.shape
    assert chosen.shape == shares.shape == (num_tokens, len(results) // num_tokens), (chosen.shape, shares.shape)
    assert results.shape == (chosen.numel(), size), (results.shape, chosen.shape, out.shape)
    assert all(tensor.is_contiguous() for tensor in (results, chosen, shares, out))
    with torch.cuda.device_of(out):
        combine_kernel[(num_tokens, cdiv(size, TILE_NUMBERS))](
            results,
            chosen,
            shares,
            out,
            SIZE=size,
            NUM_CHOICES=chosen.shape[1],
            CHOICES=power_of_two(chosen.shape[1]),
            TILE=TILE_NUMBERS,
        )


def reference_combine(results: Tensor, shares: Tensor) -> Tensor:
    """Return what `combine_experts` writes, in float64, where the order does not matter."""
    return (results.double().view(*shares.shape, -1) * shares.double()[..., None]).sum(dim=1)


@triton.jit
def combine_kernel(
    results,
    chosen,
    shares,
    out,
    SIZE: tl.constexpr,
    NUM_CHOICES: tl.constexpr,
    CHOICES: tl.constexpr,  # the same as a power of 2
    TILE: tl.constexpr,
):
    token, choice = tl.program_id(0).to(tl.int64), tl.arange(0, CHOICES)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = choice < NUM_CHOICES
    expert = tl.load(chosen + token * NUM_CHOICES + choice, mask=there, other=2147483647)
    share = tl.load(shares + token * NUM_CHOICES + choice, mask=there, other=0.0).to(tl.float32)
    order = tl.sum((expert[None, :] < expert[:, None]).to(tl.int32), axis=1)
    total = tl.zeros((TILE,), tl.float32)
    for rank in range(NUM_CHOICES):
        place = token * NUM_CHOICES + tl.sum(tl.where(order == rank, choice, 0), axis=0)
        result = tl.load(results + place * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
        total += result * tl.sum(tl.where(order == rank, share, 0.0), axis=0)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=column < SIZE)
