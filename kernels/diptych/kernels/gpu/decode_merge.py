"""The last step of decode attention for a request that several programs share: the last of them adds the parts up.

FlashDecoding's merge without a launch of its own. Rule: parts are added in the order of shares, so that equal inputs
give equal bits, whoever comes last.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

PARTS: Final = tl.constexpr(64)  # of a request whose maxima are read at once
TOGETHER: Final = tl.constexpr(8)  # of a request whose values are


@triton.jit
def merge(
    part_values,
    part_maxima,
    part_sums,
    out,  # of the request
    first_worker,
    last_worker,
    kv_head,
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Write what the parts of a request come to."""
    part, head = tl.arange(0, PARTS), tl.arange(0, GROUP_BLOCK)
    maxima = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    sums = tl.zeros((GROUP_BLOCK,), tl.float32)
    for first in tl.range(first_worker, last_worker + 1, PARTS):
        worker = first + part
        slot = (worker * 2 + (worker == first_worker).to(tl.int32)) * NUM_KV_HEADS + kv_head
        stats, exists = slot[:, None] * HEADS + head[None, :], (worker <= last_worker)[:, None]
        maximum = tl.load(part_maxima + stats, mask=exists, other=float("-inf"), cache_modifier=".cg")
        part_sum = tl.load(part_sums + stats, mask=exists, other=0.0, cache_modifier=".cg")
        new_maxima = tl.maximum(maxima, tl.max(maximum, 0))
        sums = sums * tl.exp2(maxima - new_maxima) + tl.sum(part_sum * tl.exp2(maximum - new_maxima[None, :]), 0)
        maxima = new_maxima
    # in one dimension, where each thread loads what it needs: nothing is exchanged while parts are on their way
    place = tl.arange(0, 2 * GROUP_BLOCK * HALF_BLOCK)
    half, head, which = place % HALF_BLOCK, place // HALF_BLOCK % GROUP_BLOCK, place // (GROUP_BLOCK * HALF_BLOCK)
    highest = spread(maxima, GROUP_BLOCK, HALF_BLOCK)
    values = tl.zeros(place.shape, tl.float32)
    for first in tl.range(first_worker, last_worker + 1, TOGETHER):
        for later in tl.static_range(TOGETHER):  # all on their way at once, those that do not exist too
            worker = first + later
            slot = (worker * 2 + (worker == first_worker)) * NUM_KV_HEADS + kv_head
            exists = worker <= last_worker
            maximum = tl.load(part_maxima + slot * HEADS + head, mask=exists, other=float("-inf"), cache_modifier=".cg")
            entry = ((slot * 2 + which) * GROUP + head) * HALF_BLOCK + half
            value = tl.load(part_values + entry, mask=exists & (head < GROUP), other=0.0, cache_modifier=".cg")
            values += value * tl.exp2(maximum - highest)
    result = values * spread(value_scale / sums, GROUP_BLOCK, HALF_BLOCK)
    dim = half * 2 + which if PAIRED else half + which * HALF
    target = out + (kv_head * GROUP + head) * (2 * HALF) + dim
    tl.store(target, result.to(out.dtype.element_ty), mask=(head < GROUP) & (half < HALF))


@triton.jit
def spread(of_heads, GROUP_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """Return the number of its head for each entry of a part."""
    wide = tl.broadcast_to(of_heads[None, :, None], (2, GROUP_BLOCK, HALF_BLOCK))
    return tl.reshape(wide, (2 * GROUP_BLOCK * HALF_BLOCK,))
