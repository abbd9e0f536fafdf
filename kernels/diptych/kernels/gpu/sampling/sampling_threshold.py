"""Top-k and top-p without a sort: the weight that a token must reach to stay, found by splitting a range of weights.

A cut keeps the fewest of the largest weights that together reach a target: `top_k` if each counts 1, a part of the
total if each counts what it weighs. So the threshold is the largest t for which what weighs at least t reaches the
target, it is itself a weight, and of weights equal to it all stay. Weights are not negative, hence ordered as their
bits are, and the search is over those, in four steps that read less and less:

1. among what maxima and sums of blocks tell: a weight that a part of the target is sure to reach is a lower bound;
2. among the blocks whose maximum reaches that bound, until few weights are left in the range;
3. those are collected; 4. the rest of the search is among them.

For a language model's logits the bound is near the threshold, and a small part of the blocks is read again. Flat rows
read all of them a few times. All functions run in the one program of a row.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from diptych.kernels.gpu.sampling.sampling_blocks import weights_of

SPLITS: Final = tl.constexpr(16)  # of a range, in one pass
LOOSE: Final = tl.constexpr(1 << 19)  # bits that a bound may be too low by: a sixteenth of a weight
CHUNK: Final = tl.constexpr(2048)  # values at a time
KEPT_BLOCKS: Final = tl.constexpr(16)  # at a time
BEYOND_ONE: Final = tl.constexpr(0x3F800001)  # the bits after those of the largest weight, 1
SLACK: Final = tl.constexpr(1 - 2.0**-16)  # a GPU's exp is monotonic but for rounding


@triton.jit
def cut(
    row,
    threshold,
    target,
    counts,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    FEW: tl.constexpr,
):
    """Return the threshold of a cut of what reaches `threshold`: the same if all that together does not reach `target`.

    `row` is what `choose_kernel` makes; `counts`: whether each weight counts 1.
    """
    logits, _, _, listed, few, largest, inverse = row
    low = sure_bits(row, threshold.to(tl.int32, bitcast=True), target, counts, num_blocks, BLOCK, BLOCKS)
    num_values = list_blocks(row, low.to(tl.float32, bitcast=True), num_blocks, BLOCKS) * BLOCK
    high, above = tl.full((), BEYOND_ONE, tl.int32), tl.zeros((), tl.float32)
    low, high, above = narrow(
        logits, listed, num_values, vocab_size, low, high, above, target, counts, FEW, largest, inverse, BLOCK
    )
    num_few = collect(row, num_values, vocab_size, low, high, BLOCK, FEW)
    low, high, above = narrow(few, listed, num_few, FEW, low, high, above, target, counts, 0, largest, inverse, 0)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def sure_bits(row, low, target, counts, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Return bits of a weight that enough of all is sure to reach, about the largest, `low` at least.

    Of a block whose maximum reaches t, the maximum does, and the whole sum but for t times the other tokens.
    """
    _, maxima, sums, _, _, largest, inverse = row
    block = tl.arange(0, BLOCKS)
    tops = tl.load(maxima + block, mask=block < num_blocks, other=float("-inf"))
    weights = weights_of(tops, largest, inverse)[:, None]
    own = tl.load(sums + block, mask=block < num_blocks, other=0.0)[:, None]
    high = tl.full((), BEYOND_ONE, tl.int32)
    while high - low > LOOSE:
        edges, step = edges_of(low, high)
        edges = edges[None, :]
        sure = tl.where(counts, 1.0, tl.maximum(weights, own - edges * (BLOCK - 1)))
        reached = tl.sum(tl.where(weights >= edges, sure, 0.0), axis=0)
        num_enough = tl.sum((reached >= target).to(tl.int32), axis=0)
        high = tl.minimum(low + step * (num_enough + 1), high)
        low = low + step * num_enough
    return low


@triton.jit
def edges_of(low, high):
    """Return weights that split a range of bits evenly, and how far apart they are."""
    step = (high - low + SPLITS) // (SPLITS + 1)
    return tl.minimum(low + step * (1 + tl.arange(0, SPLITS)), high).to(tl.float32, bitcast=True), step


@triton.jit
def narrow(
    values,
    listed,
    num_values,
    size,
    low,
    high,
    above,
    target,
    counts,
    num_wanted,
    largest,
    inverse,
    BLOCK: tl.constexpr,
):
    """Return a smaller range of bits [low, high) that the threshold is in, and the mass of what reaches `high`.

    The range has either one number, or about `num_wanted` of the values at most. `above` is the mass beyond `high`
    that is not among the values.
    """
    base = above
    at_low = tl.full((), float("inf"), tl.float32)
    num_inside = tl.zeros((), tl.float32) + num_values
    while (high - low > 1) & (num_inside > num_wanted):
        edges, step = edges_of(low, high)
        edges = edges[None, :]
        mass = tl.zeros((CHUNK, SPLITS), tl.float32)
        start = tl.zeros((), tl.int32)
        while start < num_values:
            x = load_chunk(values, listed, start, num_values, size, BLOCK)
            weights = weights_of(x, largest, inverse)[:, None]
            mass += tl.where(weights >= edges, tl.where(counts, 1.0, weights), 0.0)
            start += CHUNK
        reached = base + tl.sum(mass, axis=0)
        enough = reached >= target
        num_enough = tl.sum(enough.to(tl.int32), axis=0)
        above = tl.maximum(above, tl.max(tl.where(enough, 0.0, reached), axis=0))
        at_low = tl.minimum(at_low, tl.min(tl.where(enough, reached, float("inf")), axis=0))
        high = tl.minimum(low + step * (num_enough + 1), high)
        low = low + step * num_enough
        least = tl.where(counts, 1.0, tl.maximum(low.to(tl.float32, bitcast=True), 1e-37))
        num_inside = (at_low - above) / least
    return low, high, above


@triton.jit
def load_chunk(values, listed, start, num_values, size, BLOCK: tl.constexpr):
    """Return the values from place `start` on, of the listed blocks if there is a block size; -inf beyond their end."""
    place = start + tl.arange(0, CHUNK)
    inside = place < num_values
    if BLOCK > 0:
        block = tl.load(listed + place // BLOCK, mask=inside, other=0)
        place = tl.max_contiguous(tl.multiple_of(block * BLOCK + place % BLOCK, BLOCK), BLOCK)
        inside &= place < size
    return tl.load(values + place, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def list_blocks(row, threshold, num_blocks, BLOCKS: tl.constexpr):
    """Fill `listed` with the blocks that may have weights that reach `threshold` and are not 0; return how many."""
    _, maxima, _, listed, _, largest, inverse = row
    block = tl.arange(0, BLOCKS)
    tops = tl.load(maxima + block, mask=block < num_blocks, other=float("-inf"))
    weights = weights_of(tops, largest, inverse)
    reaches = (weights >= threshold * SLACK) & (weights > 0)
    tl.debug_barrier()  # the list before this one has been read
    tl.store(listed + tl.cumsum(reaches.to(tl.int32), axis=0) - 1, block, mask=reaches)
    tl.debug_barrier()
    return tl.sum(reaches.to(tl.int32), axis=0)


@triton.jit
def collect(row, num_values, size, low, high, BLOCK: tl.constexpr, FEW: tl.constexpr):
    """Copy the logits of the listed blocks whose weights are in [low, high) to `few`; return how many there are."""
    logits, _, _, listed, few, largest, inverse = row
    num_found = tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int32)
    tl.debug_barrier()  # what was collected before has been read
    while start < num_values:
        x = load_chunk(logits, listed, start, num_values, size, BLOCK)
        bits = weights_of(x, largest, inverse).to(tl.int32, bitcast=True)
        is_inside = ((bits >= low) & (bits < high)).to(tl.int32)
        place = num_found + tl.cumsum(is_inside, axis=0) - 1
        tl.store(few + place, x, mask=(is_inside > 0) & (place < FEW))
        num_found += tl.sum(is_inside, axis=0)
        start += CHUNK
    tl.debug_barrier()
    return tl.minimum(num_found, FEW)


@triton.jit
def keep(row, threshold, vocab_size, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Replace `sums` by those of the weights that reach `threshold`."""
    logits, _, sums, listed, _, largest, inverse = row
    num_listed = list_blocks(row, threshold, num_blocks, BLOCKS)
    block = tl.arange(0, BLOCKS)
    tl.store(sums + block, tl.zeros((BLOCKS,), tl.float32), mask=block < num_blocks)
    tl.debug_barrier()
    start = tl.zeros((), tl.int32)
    while start < num_listed:
        place = start + tl.arange(0, KEPT_BLOCKS)
        kept = tl.load(listed + place, mask=place < num_listed, other=0)
        token = kept[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (place < num_listed)[:, None] & (token < vocab_size)
        x = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
        weights = weights_of(x, largest, inverse)
        tl.store(sums + kept, tl.sum(tl.where(weights >= threshold, weights, 0.0), axis=1), mask=place < num_listed)
        start += KEPT_BLOCKS
    tl.debug_barrier()
