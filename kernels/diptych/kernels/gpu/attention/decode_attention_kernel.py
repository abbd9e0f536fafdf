"""The Triton kernel behind `decode_attention.py`: every program takes an equal share of the tiles of one KV head.

The KV of all requests, as one KV head has it, is a line of tiles of `BLOCK` tokens. It is cut into `num_workers` equal
shares wherever a cut falls (Lean Attention, arXiv 2405.10480), so that uneven contexts load the GPU evenly. A request
that lies in one share is written out at once; else every share leaves a part of it, and who comes last adds them up
(FlashDecoding's merge without a second launch). Rule: no share reads a token that its request does not see.

Rows of one request that follow each other (`ROWS`: its newest token and drafts) are one entry of that line: their heads
share a tile of queries, and so what is read. A row sees one token more than the one before.

Head dimensions are handled as two halves. Of wider KV these are the lower and the upper dimensions. FP8 comes in pairs
of neighbours, 16 bits as tensor cores are fed with, so the halves are the even and the odd dimensions; one instruction
converts two numbers to float16. One by one, FP8 values would be read from shared memory byte by byte.
"""

from __future__ import annotations

import math
from typing import Final

import triton
import triton.language as tl

from diptych.kernels.gpu.casts import widen

PARTS: Final = tl.constexpr(64)  # of a request whose maxima are read at once
TOGETHER: Final = tl.constexpr(8)  # of a request whose values are
LOG2_E: Final = tl.constexpr(math.log2(math.e))


@triton.jit(
    do_not_specialize=["batch_size", "table_stride", "num_workers", "window"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "firsts", "counts"],
)
def decode_attention_kernel(
    q,  # [batch, num_heads, head_dim]
    kv,  # [num_pages, 2, page_size, num_kv_heads, head_dim], in int16 pairs if PAIRED
    page_table,
    seq_lens,
    out,
    part_values,  # [slots, num_kv_heads, 2, GROUP, HALF_BLOCK]
    part_maxima,  # [slots, num_kv_heads, HEADS], of exponents of two
    part_sums,  # like part_maxima
    arrived,  # [batch, num_kv_heads]: parts that are ready; 0 again at the end
    sinks,  # [num_heads] if SINKS
    firsts,  # [batch] if ROWS > 1: the first row of each entry
    counts,  # [batch] if ROWS > 1: its rows; 0: it is none
    batch_size,
    q_stride,
    out_stride,
    table_stride,
    page_stride,  # strides in entries of `kv`
    value_offset,
    token_stride,
    num_workers,  # shares of each KV head
    window,  # tokens that a request sees at most
    score_scale,  # to powers of two, or of a soft cap to the argument of tanh
    value_scale,
    softcap,  # in powers of two
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a KV head
    ROWS: tl.constexpr,  # of an entry, at most
    GROUP_BLOCK: tl.constexpr,  # of all their heads, the next power of two
    HEADS: tl.constexpr,  # rows of a tile: 16 at least, what tensor cores take
    HALF: tl.constexpr,  # half of the head dimension
    HALF_BLOCK: tl.constexpr,  # that and more: columns of a tile
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens a tile
    BATCH: tl.constexpr,  # the batch and more
    PAIRED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    CHUNKED: tl.constexpr,  # the window does not slide
    DTYPE: tl.constexpr,  # of products
    STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    kv_head, worker = tl.program_id(0) % NUM_KV_HEADS, tl.program_id(0) // NUM_KV_HEADS
    requests = tl.arange(0, BATCH)
    # an empty request is a tile without tokens: somebody has to write its zeros
    if ROWS > 1:
        rows = tl.load(counts + requests, mask=requests < batch_size, other=0)
        shortest = tl.load(seq_lens + tl.load(firsts + requests, mask=rows > 0, other=0), mask=rows > 0, other=0)
        lens = shortest + tl.maximum(rows - 1, 0)
        tiles = tl.maximum(tl.cdiv(lens, BLOCK) - first_seen(shortest, window, CHUNKED) // BLOCK, 1)
        ends = tl.cumsum(tl.where(rows > 0, tiles, 0))
    else:
        lens = tl.load(seq_lens + requests, mask=requests < batch_size, other=0)
        tiles = tl.maximum(tl.cdiv(lens, BLOCK) - first_seen(lens, window, CHUNKED) // BLOCK, 1)
        ends = tl.cumsum(tl.where(requests < batch_size, tiles, 0))
    num_tiles = tl.max(ends)
    share = tl.cdiv(num_tiles, num_workers)  # the last ones are smaller or empty: fewer parts, which cost time
    tile = worker * share
    share_end = tl.minimum(tile + share, num_tiles)

    head, half = tl.arange(0, HEADS), tl.arange(0, HALF_BLOCK)
    is_head, is_dim = (head < ROWS * GROUP)[:, None], (half < HALF)[None, :]
    dims = half * 2 if PAIRED else half
    head_offsets = (kv_head * GROUP + head % GROUP)[:, None] * (2 * HALF) + dims[None, :]
    other_half = 1 if PAIRED else HALF
    head_kv = kv + kv_head * (HALF if PAIRED else 2 * HALF)
    while tile < share_end:
        request = tl.sum((ends <= tile).to(tl.int32))
        request_end = tl.sum(tl.where(requests == request, ends, 0))
        if ROWS > 1:
            row = tl.load(firsts + request)
            num_rows = tl.load(counts + request)
            own_len = tl.load(seq_lens + row) + head // GROUP  # of each line: the row before sees one token less
            seq_len = tl.load(seq_lens + row) + num_rows - 1
            seen_from = first_seen(tl.load(seq_lens + row), window, CHUNKED)
            is_head = (head < num_rows * GROUP)[:, None]
        else:
            row = request
            seq_len = tl.load(seq_lens + request)
            seen_from = first_seen(seq_len, window, CHUNKED)
        end_block = tl.cdiv(seq_len, BLOCK)
        first_block = seen_from // BLOCK
        request_start = request_end - tl.maximum(end_block - first_block, 1)
        next_tile = tl.minimum(share_end, request_end)
        start = first_block + tile - request_start
        stop = tl.minimum(first_block + next_tile - request_start, end_block)

        pages = page_table + row.to(tl.int64) * table_stride
        query = q + row.to(tl.int64) * q_stride + head_offsets
        if ROWS > 1:
            query += (head // GROUP)[:, None] * q_stride
        q_0 = tl.load(query, mask=is_head & is_dim, other=0.0).to(DTYPE)
        q_1 = tl.load(query + other_half, mask=is_head & is_dim, other=0.0).to(DTYPE)
        maxima = tl.full((HEADS,), float("-inf"), tl.float32)
        sums = tl.zeros((HEADS, BLOCK), tl.float32)  # over tiles only: one sum over tokens at the end
        if SINKS:  # of the share that a request begins in: a first score, without a value
            sink = tl.load(sinks + kv_head * GROUP + head % GROUP, mask=head < ROWS * GROUP, other=float("-inf"))
            maxima = tl.where(tile == request_start, sink * LOG2_E, maxima)
            sums = tl.where((tile == request_start) & (tl.arange(0, BLOCK) == 0)[None, :], 1.0, sums)
        acc_0 = tl.zeros((HEADS, HALF_BLOCK), tl.float32)
        acc_1 = tl.zeros((HEADS, HALF_BLOCK), tl.float32)
        page = page_of(pages, start, seq_len, PAGE_SIZE, BLOCK)
        for block in tl.range(start, stop, num_stages=STAGES):
            token = block * BLOCK + tl.arange(0, BLOCK)
            place = page.to(tl.int64) * page_stride + token % PAGE_SIZE * token_stride
            page = page_of(pages, block + 1, seq_len, PAGE_SIZE, BLOCK)  # ahead: the next tile's copies need it
            places = head_kv + place[:, None] + half[None, :]
            seen = (token < seq_len) & (token >= seen_from)
            inside = seen[:, None] & is_dim
            k_0, k_1 = load_halves(places, inside, HALF, PAIRED, COMPILED)
            scores = tl.dot(q_0, tl.trans(k_0.to(DTYPE)), input_precision="ieee")
            scores = tl.dot(q_1, tl.trans(k_1.to(DTYPE)), scores, input_precision="ieee") * score_scale
            if CAPPED:
                scores = softcap - 2 * softcap / (tl.exp2(scores) + 1)
            if ROWS > 1:
                own_from = first_seen(own_len, window, CHUNKED)
                own = (token[None, :] < own_len[:, None]) & (token[None, :] >= own_from[:, None])
                scores = tl.where(own & seen[None, :], scores, float("-inf"))
            else:
                scores = tl.where(seen[None, :], scores, float("-inf"))
            new_maxima = tl.maximum(maxima, tl.max(scores, 1))
            shift = finite(new_maxima) if ROWS > 1 else new_maxima
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(maxima - shift)
            maxima = new_maxima
            sums = sums * decay[:, None] + weights
            v_0, v_1 = load_halves(places + value_offset, inside, HALF, PAIRED, COMPILED)
            acc_0 = tl.dot(weights.to(DTYPE), v_0.to(DTYPE), acc_0 * decay[:, None], input_precision="ieee")
            acc_1 = tl.dot(weights.to(DTYPE), v_1.to(DTYPE), acc_1 * decay[:, None], input_precision="ieee")

        sum_ = tl.sum(sums, 1)
        target = out + row.to(tl.int64) * out_stride + head_offsets
        if ROWS > 1:
            target += (head // GROUP)[:, None] * out_stride
        first_worker = request_start // share
        last_worker = (request_end - 1) // share
        if first_worker == last_worker:
            factor = (value_scale / tl.where(sum_ == 0, 1.0, sum_))[:, None]
            tl.store(target, (acc_0 * factor).to(out.dtype.element_ty), mask=is_head & is_dim)
            tl.store(target + other_half, (acc_1 * factor).to(out.dtype.element_ty), mask=is_head & is_dim)
        else:
            # a share holds two parts of requests at most: one that came in, slot 0, and one that goes on, slot 1
            slot = (worker * 2 + (worker == first_worker).to(tl.int32)) * NUM_KV_HEADS + kv_head
            tl.store(part_maxima + slot * HEADS + head, maxima)
            tl.store(part_sums + slot * HEADS + head, sum_)
            part = part_values + slot * (2 * ROWS * GROUP * HALF_BLOCK) + head[:, None] * HALF_BLOCK + half[None, :]
            tl.store(part, acc_0, mask=is_head)
            tl.store(part + ROWS * GROUP * HALF_BLOCK, acc_1, mask=is_head)
            tl.debug_barrier()  # the stores of all threads come before the release of the one that adds
            count = arrived + request * NUM_KV_HEADS + kv_head
            if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == last_worker - first_worker:
                merge(
                    part_values, part_maxima, part_sums, out + row.to(tl.int64) * out_stride, out_stride,
                    num_rows * GROUP if ROWS > 1 else GROUP, first_worker, last_worker, kv_head, value_scale,
                    NUM_KV_HEADS, GROUP, ROWS, GROUP_BLOCK, HEADS, HALF, HALF_BLOCK, PAIRED,
                )  # fmt: skip
                tl.store(count, 0)
        tile = next_tile


@triton.jit
def finite(maxima):
    """Return 0 in the place of a maximum of nothing: of a row that sees no token of what was read so far."""
    return tl.where(maxima == float("-inf"), 0.0, maxima)


@triton.jit
def first_seen(lens, window, CHUNKED: tl.constexpr):
    """Return the first token that the last one of so many sees."""
    if CHUNKED:
        return tl.maximum(lens - 1, 0) // window * window
    else:
        return tl.maximum(lens - window, 0)


@triton.jit
def page_of(pages, block, seq_len, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the page of each token of a tile, one number where all are in one page; 0 where the request has ended."""
    if PAGE_SIZE % BLOCK == 0:
        return tl.load(pages + block * BLOCK // PAGE_SIZE, mask=block * BLOCK < seq_len, other=0)
    else:
        token = block * BLOCK + tl.arange(0, BLOCK)
        return tl.load(pages + token // PAGE_SIZE, mask=token < seq_len, other=0)


@triton.jit
def load_halves(places, inside, HALF: tl.constexpr, PAIRED: tl.constexpr, COMPILED: tl.constexpr):
    """Return the two halves of keys or values, 0 where there is none."""
    if PAIRED:
        return unpacked(tl.load(places, mask=inside, other=0), COMPILED)
    else:
        return tl.load(places, mask=inside, other=0.0), tl.load(places + HALF, mask=inside, other=0.0)


@triton.jit
def unpacked(pairs, COMPILED: tl.constexpr):
    """Return the float16 values of the low and of the high bytes, FP8 e4m3."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted; .reg .b16 low, high;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return widen(pairs & 0xFF, "fp8_e4m3").to(tl.float16), widen(pairs >> 8 & 0xFF, "fp8_e4m3").to(tl.float16)


@triton.jit
def merge(
    part_values,
    part_maxima,
    part_sums,
    out,  # of the request, or of its first row
    out_stride,
    num_lines,  # heads of all its rows
    first_worker,
    last_worker,
    kv_head,
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Write what the parts of a request come to, added in the order of shares: equal inputs give equal bits."""
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
        shift = finite(new_maxima) if ROWS > 1 else new_maxima
        sums = sums * tl.exp2(maxima - shift) + tl.sum(part_sum * tl.exp2(maximum - shift[None, :]), 0)
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
            entry = ((slot * 2 + which) * (ROWS * GROUP) + head) * HALF_BLOCK + half
            value = tl.load(part_values + entry, mask=exists & (head < num_lines), other=0.0, cache_modifier=".cg")
            values += value * tl.exp2(maximum - highest)
    result = values * spread(value_scale / sums, GROUP_BLOCK, HALF_BLOCK)
    dim = half * 2 + which if PAIRED else half + which * HALF
    target = out + (kv_head * GROUP + head % GROUP) * (2 * HALF) + dim
    if ROWS > 1:
        target += head // GROUP * out_stride
    tl.store(target, result.to(out.dtype.element_ty), mask=(head < num_lines) & (half < HALF))


@triton.jit
def spread(of_heads, GROUP_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """Return the number of its head for each entry of a part."""
    wide = tl.broadcast_to(of_heads[None, :, None], (2, GROUP_BLOCK, HALF_BLOCK))
    return tl.reshape(wide, (2 * GROUP_BLOCK * HALF_BLOCK,))
