"""Top-k, top-p, min-p and the draw among the few tokens of a row that can be left: without another look at the logits.

What maxima and sums of blocks tell bounds the threshold of the first cut from below. Tokens that reach the bound are
the candidates: for a language model's logits tens or hundreds. They are collected once, in the order of their ids, and
stay in registers from then on: a cut is a search over their weights, and a draw looks a number up in their running sum.
Rows with more candidates than `FEW` are flat, and are left to `sampling_threshold`. All functions run in the one
program of a row.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from diptych.kernels.gpu.sampling.sampling_blocks import weights_of
from diptych.kernels.gpu.sampling.sampling_threshold import BEYOND_ONE, edges_of, list_blocks, sure_bits

AT_ONCE: Final = tl.constexpr(8192)  # logits that are looked at for candidates
LISTED: Final = tl.constexpr(256)  # blocks that candidates may be in


@triton.jit
def candidates(
    row,
    tokens,
    k,
    p,
    least,
    total,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    FEW: tl.constexpr,
):
    """Collect the weights and `tokens` of a row that can be left; return how many, and the bits that all of them reach.

    More than `FEW`: there are too many, and what was collected means nothing.
    """
    counts = (k > 0) & (k < vocab_size)
    low = tl.zeros((), tl.int32)
    if counts | (p < 1):
        target = tl.where(counts, k.to(tl.float32), (p.to(tl.float64) * total).to(tl.float32))
        low = sure_bits(row, low, target, counts, num_blocks, BLOCK, BLOCKS)
    else:
        low = least.to(tl.int32, bitcast=True)
    num_listed = list_blocks(row, low.to(tl.float32, bitcast=True), num_blocks, BLOCKS)
    num_found = tl.full((), FEW + 1, tl.int32)
    if num_listed <= LISTED:
        num_found = gather(row, tokens, num_listed * BLOCK, vocab_size, low, BLOCK, FEW)
    return num_found, low


@triton.jit
def gather(row, tokens, num_values, vocab_size, low, BLOCK: tl.constexpr, FEW: tl.constexpr):
    """Copy the weights of the listed blocks that reach `low` to `few`, and their tokens; return how many there are."""
    logits, _, _, listed, few, largest, inverse = row
    num_found = tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int32)
    while start < num_values:
        place = start + tl.arange(0, AT_ONCE)
        inside = place < num_values
        block = tl.load(listed + place // BLOCK, mask=inside, other=0)
        token = tl.max_contiguous(tl.multiple_of(block * BLOCK + place % BLOCK, BLOCK), BLOCK)
        x = tl.load(logits + token, mask=inside & (token < vocab_size), other=float("-inf")).to(tl.float32)
        weights = weights_of(x, largest, inverse)
        is_found = ((weights > 0) & (weights.to(tl.int32, bitcast=True) >= low)).to(tl.int32)
        at = num_found + tl.cumsum(is_found, axis=0) - 1
        fits = (is_found > 0) & (at < FEW)
        tl.store(few + at, weights, mask=fits)
        tl.store(tokens + at, token, mask=fits)
        num_found += tl.sum(is_found, axis=0)
        start += AT_ONCE
    tl.debug_barrier()
    return num_found


@triton.jit
def left_of(few, num_few, low, k, p, least, vocab_size, total, FEW: tl.constexpr):
    """Return the weights of the candidates, with zeros in place of those that are cut."""
    place = tl.arange(0, FEW)
    weights = tl.load(few + place, mask=place < num_few, other=0.0)
    if (k > 0) & (k < vocab_size):
        low = threshold_of(weights, low, k.to(tl.float32), True)
        weights = tl.where(weights >= low.to(tl.float32, bitcast=True), weights, 0.0)
        total = tl.sum(weights.to(tl.float64), axis=0)
    if p < 1:
        low = threshold_of(weights, low, (p.to(tl.float64) * total).to(tl.float32), False)
        weights = tl.where(weights >= low.to(tl.float32, bitcast=True), weights, 0.0)
    return tl.where(weights >= least, weights, 0.0)


@triton.jit
def threshold_of(weights, low, target, COUNTS: tl.constexpr):
    """Return the bits of the largest weight whose mass, or number, and that of all above reaches `target`."""
    high = tl.full((), BEYOND_ONE, tl.int32)
    amounts = (tl.full(weights.shape, 1.0, tl.float32) if COUNTS else weights)[:, None]
    while high - low > 1:
        edges, step = edges_of(low, high)
        reached = tl.sum(tl.where(weights[:, None] >= edges[None, :], amounts, 0.0), axis=0)
        num_enough = tl.sum((reached >= target).to(tl.int32), axis=0)
        high = tl.minimum(low + step * (num_enough + 1), high)
        low = low + step * num_enough
    return low
