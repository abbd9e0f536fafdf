"""The Triton kernels behind `latent_attention.py`: what a token keeps is read once for all heads, as key and as value.

A tile of rows, heads of one token or of several, walks the keys that it sees, with a running maximum and sum (arXiv
2205.14135). A key is a latent and some rotated dimensions behind it; its value is the latent, which lies in shared
memory by then: FlashMLA's idea. Decode steps are cut into equal shares of tiles as in `decode_attention_kernel.py`,
which has the loads of halves, too; what several shares have of a request, a second kernel adds up in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from diptych.kernels.gpu.attention.decode_attention_kernel import load_halves, page_of
from diptych.kernels.gpu.attention.extend_attention import find_request


@triton.jit(
    do_not_specialize=["batch_size", "table_stride", "num_workers"],
    do_not_specialize_on_alignment=["page_table", "seq_lens"],
)
def latent_decode_kernel(
    q,  # [batch, num_heads, 2 * (HALF + ROPE_HALF)]
    kv,  # [num_pages, page_size, 2 * (HALF + ROPE_HALF)], in int16 pairs if PAIRED
    page_table,
    seq_lens,
    out,  # [batch, num_heads, 2 * HALF]
    part_values,  # [slots, num_heads, 2 * HALF]
    part_maxima,  # [slots, num_heads], of exponents of two
    part_sums,  # like part_maxima
    batch_size,
    q_stride,
    out_stride,
    table_stride,
    page_stride,  # strides in entries of `kv`
    token_stride,
    num_workers,  # shares of each tile of heads
    score_scale,  # to powers of two
    value_scale,
    HEAD_TILES: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a tile
    ROWS: tl.constexpr,  # that and more
    HALF: tl.constexpr,  # half of the latent
    HALF_BLOCK: tl.constexpr,
    ROPE_HALF: tl.constexpr,  # half of the dimensions that rotate
    ROPE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens a tile
    BATCH: tl.constexpr,  # the batch and more
    PAIRED: tl.constexpr,
    DTYPE: tl.constexpr,  # of products
    STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
    EARLY: tl.constexpr,  # whether the sum of parts is launched while this one runs
):
    if EARLY:
        gdc_launch_dependents()
    head_tile, worker = tl.program_id(0) % HEAD_TILES, tl.program_id(0) // HEAD_TILES
    row = tl.arange(0, ROWS)
    head, is_row = head_tile * GROUP + row, row < GROUP
    requests = tl.arange(0, BATCH)
    ends = ends_of_requests(seq_lens, requests, batch_size, BLOCK)
    num_tiles = tl.max(ends)
    share = tl.cdiv(num_tiles, num_workers)
    tile = worker * share
    share_end = tl.minimum(tile + share, num_tiles)
    while tile < share_end:
        request = tl.sum((ends <= tile).to(tl.int32))
        request_end = tl.sum(tl.where(requests == request, ends, 0))
        seq_len = tl.load(seq_lens + request)
        request_start = request_end - tl.maximum(tl.cdiv(seq_len, BLOCK), 1)
        next_tile = tl.minimum(share_end, request_end)
        start = (tile - request_start) * BLOCK
        stop = tl.minimum((next_tile - request_start) * BLOCK, seq_len)
        maxima, sums, acc_0, acc_1 = walk(
            q + request.to(tl.int64) * q_stride + head * (2 * HALF + 2 * ROPE_HALF),
            is_row, kv, page_table + request.to(tl.int64) * table_stride,
            tl.full((ROWS,), seq_len - 1, tl.int32), start, stop, seq_len, page_stride, token_stride, score_scale,
            ROWS, HALF, HALF_BLOCK, ROPE_HALF, ROPE_BLOCK, PAGE_SIZE, BLOCK, PAIRED, DTYPE, STAGES, COMPILED,
        )  # fmt: skip
        first_worker = request_start // share
        if first_worker == (request_end - 1) // share:
            factor = (value_scale / tl.where(sums == 0, 1.0, sums))[:, None]
            target = out + request.to(tl.int64) * out_stride + head * (2 * HALF)
            store_halves(target, acc_0 * factor, acc_1 * factor, is_row, HALF, HALF_BLOCK, PAIRED)
        else:
            # a share holds two parts of requests at most: one that came in, slot 0, and one that goes on, slot 1
            place = (worker * 2 + (worker == first_worker).to(tl.int32)) * (HEAD_TILES * GROUP) + head
            tl.store(part_maxima + place, maxima, mask=is_row)
            tl.store(part_sums + place, sums, mask=is_row)
            part = part_values + place.to(tl.int64) * (2 * HALF)
            store_halves(part, acc_0, acc_1, is_row, HALF, HALF_BLOCK, PAIRED)
        tile = next_tile


@triton.jit(
    do_not_specialize=["batch_size", "num_workers"],
    do_not_specialize_on_alignment=["seq_lens"],
)
def latent_merge_kernel(
    part_values,
    part_maxima,
    part_sums,
    seq_lens,
    out,
    batch_size,
    out_stride,
    num_workers,
    value_scale,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,  # of values
    DIM_BLOCK: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    TOGETHER: tl.constexpr,  # parts that are read at once
    EARLY: tl.constexpr,
):
    """Add up the parts of one head of a request, in an order that shares alone decide: equal inputs give equal bits."""
    request, head = tl.program_id(0), tl.program_id(1)
    requests, dim = tl.arange(0, BATCH), tl.program_id(2) * DIM_BLOCK + tl.arange(0, DIM_BLOCK)
    ends = ends_of_requests(seq_lens, requests, batch_size, BLOCK)
    share = tl.cdiv(tl.max(ends), num_workers)
    request_end = tl.sum(tl.where(requests == request, ends, 0))
    request_start = request_end - tl.maximum(tl.cdiv(tl.load(seq_lens + request), BLOCK), 1)
    first_worker, last_worker = request_start // share, (request_end - 1) // share
    if EARLY:
        gdc_wait()  # who left parts is over, for this launch and for those behind it
    if first_worker == last_worker:
        return
    maximum, sum_ = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    values = tl.zeros((DIM_BLOCK,), tl.float32)
    for first in tl.range(first_worker, last_worker + 1, TOGETHER):
        worker = first + tl.arange(0, TOGETHER)
        is_part = worker <= last_worker
        place = (worker * 2 + (worker == first_worker).to(tl.int32)) * NUM_HEADS + head
        maximum, sum_, values = add_parts(
            part_values, part_maxima, part_sums, place, is_part, maximum, sum_, values, dim, DIM
        )
    target = out + request.to(tl.int64) * out_stride + head * DIM + dim
    tl.store(target, (values * (value_scale / sum_)).to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def add_parts(part_values, part_maxima, part_sums, places, is_part, maximum, sum_, values, dim, DIM: tl.constexpr):
    """Return the maximum, the sum of weights and that of values of one head with the parts at `places` in them."""
    maxima = tl.load(part_maxima + places, mask=is_part, other=float("-inf"))
    sums = tl.load(part_sums + places, mask=is_part, other=0.0)
    rows = part_values + places.to(tl.int64)[:, None] * DIM + dim[None, :]
    parts = tl.load(rows, mask=is_part[:, None] & (dim < DIM)[None, :], other=0.0)
    new_maximum = tl.maximum(maximum, tl.max(maxima))
    shrink, grow = tl.exp2(maximum - new_maximum), tl.exp2(maxima - new_maximum)
    values = values * shrink + tl.sum(parts * grow[:, None], 0)
    return new_maximum, sum_ * shrink + tl.sum(sums * grow), values


@triton.jit(
    do_not_specialize=["batch_size", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "extend_starts"],
)
def latent_extend_kernel(
    q,
    kv,
    page_table,
    seq_lens,
    extend_starts,
    out,
    batch_size,
    q_stride,
    out_stride,
    table_stride,
    page_stride,
    token_stride,
    score_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,  # pairs of a token and a head
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROPE_HALF: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Tiles are found as in `extend_attention.py`."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first: ends of prompts see the most keys
    request = find_request(tile, extend_starts, batch_size, NUM_HEADS, ROWS)
    extend_start = tl.load(extend_starts + request)
    extend_len = tl.load(extend_starts + request + 1) - extend_start
    first_row = (tile - extend_start * NUM_HEADS // ROWS - request) * ROWS
    if first_row >= extend_len * NUM_HEADS:
        return
    seq_len = tl.load(seq_lens + request)
    rows = first_row + tl.arange(0, ROWS)
    tokens, heads = rows // NUM_HEADS, rows % NUM_HEADS
    is_row, positions = tokens < extend_len, seq_len - extend_len + tl.minimum(tokens, extend_len - 1)
    row_ids = (extend_start + tokens).to(tl.int64)
    _, sums, acc_0, acc_1 = walk(
        q + row_ids * q_stride + heads * (2 * HALF + 2 * ROPE_HALF),
        is_row, kv, page_table + request.to(tl.int64) * table_stride,
        positions, 0, tl.max(positions) + 1, seq_len, page_stride, token_stride, score_scale,
        ROWS, HALF, HALF_BLOCK, ROPE_HALF, ROPE_BLOCK, PAGE_SIZE, BLOCK, PAIRED, DTYPE, STAGES, COMPILED,
    )  # fmt: skip
    factor = (value_scale / sums)[:, None]
    target = out + row_ids * out_stride + heads * (2 * HALF)
    store_halves(target, acc_0 * factor, acc_1 * factor, is_row, HALF, HALF_BLOCK, PAIRED)


@triton.jit
def ends_of_requests(seq_lens, requests, batch_size, BLOCK: tl.constexpr):
    """Return where the tiles of each request end on the line of all; an empty request has one without tokens."""
    lens = tl.load(seq_lens + requests, mask=requests < batch_size, other=0)
    return tl.cumsum(tl.where(requests < batch_size, tl.maximum(tl.cdiv(lens, BLOCK), 1), 0))


@triton.jit
def walk(
    q_rows,  # where each row's query begins
    is_row,
    kv,
    pages,  # of the request
    positions,  # the last token that each row sees
    start,  # a multiple of BLOCK
    stop,
    seq_len,
    page_stride,
    token_stride,
    score_scale,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROPE_HALF: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Return maxima and sums of weights `[ROWS]`, and the two halves of the sum of values, not divided."""
    half, rope = tl.arange(0, HALF_BLOCK), tl.arange(0, ROPE_BLOCK)
    q_0, q_1 = load_query(q_rows, is_row, half, HALF, PAIRED, DTYPE)
    r_0, r_1 = load_query(q_rows + 2 * HALF, is_row, rope, ROPE_HALF, PAIRED, DTYPE)
    maxima = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    acc_0 = tl.zeros((ROWS, HALF_BLOCK), tl.float32)
    acc_1 = tl.zeros((ROWS, HALF_BLOCK), tl.float32)
    page = page_of(pages, start // BLOCK, seq_len, PAGE_SIZE, BLOCK)
    for block in tl.range(start // BLOCK, tl.cdiv(stop, BLOCK), num_stages=STAGES):
        token = block * BLOCK + tl.arange(0, BLOCK)
        places = kv + (page.to(tl.int64) * page_stride + token % PAGE_SIZE * token_stride)[:, None]
        page = page_of(pages, block + 1, seq_len, PAGE_SIZE, BLOCK)  # ahead: the next tile's copies need it
        maxima, sums, acc_0, acc_1 = take_in(
            q_0, q_1, r_0, r_1, places, (token < seq_len)[:, None], token[None, :] <= positions[:, None],
            maxima, sums, acc_0, acc_1, score_scale,
            HALF, HALF_BLOCK, ROPE_HALF, ROPE_BLOCK, PAIRED, DTYPE, COMPILED,
        )  # fmt: skip
    return maxima, sums, acc_0, acc_1


@triton.jit
def take_in(
    q_0,  # queries, as `load_query` has them: of the latent,
    q_1,
    r_0,  # and of what is rotated
    r_1,
    places,  # [BLOCK, 1]: where each token's latent begins
    exists,  # [BLOCK, 1]
    seen,  # which tokens each row sees, [ROWS, BLOCK] or all rows the same [1, BLOCK]
    maxima,
    sums,
    acc_0,
    acc_1,
    score_scale,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROPE_HALF: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
    DTYPE: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Return maxima, sums of weights and sums of values with a tile more in them."""
    half, rope = tl.arange(0, HALF_BLOCK), tl.arange(0, ROPE_BLOCK)
    rope_at = HALF if PAIRED else 2 * HALF
    k_0, k_1 = load_halves(places + half[None, :], exists & (half < HALF)[None, :], HALF, PAIRED, COMPILED)
    turned = exists & (rope < ROPE_HALF)[None, :]
    t_0, t_1 = load_halves(places + rope_at + rope[None, :], turned, ROPE_HALF, PAIRED, COMPILED)
    scores = tl.dot(q_0, tl.trans(k_0.to(DTYPE)), input_precision="ieee")
    scores = tl.dot(q_1, tl.trans(k_1.to(DTYPE)), scores, input_precision="ieee")
    scores = tl.dot(r_0, tl.trans(t_0.to(DTYPE)), scores, input_precision="ieee")
    scores = tl.dot(r_1, tl.trans(t_1.to(DTYPE)), scores, input_precision="ieee") * score_scale
    scores = tl.where(seen, scores, float("-inf"))
    new_maxima = tl.maximum(maxima, tl.max(scores, 1))
    # a row that has seen nothing yet: minus infinity less itself is not a number
    shift = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(maxima - shift)
    sums = sums * decay + tl.sum(weights, 1)
    acc_0 = tl.dot(weights.to(DTYPE), k_0.to(DTYPE), acc_0 * decay[:, None], input_precision="ieee")
    acc_1 = tl.dot(weights.to(DTYPE), k_1.to(DTYPE), acc_1 * decay[:, None], input_precision="ieee")
    return new_maxima, sums, acc_0, acc_1


@triton.jit
def load_query(rows, is_row, column, HALF: tl.constexpr, PAIRED: tl.constexpr, DTYPE: tl.constexpr):
    """Return the halves as `load_halves` has them: lower and upper dimensions, or even and odd ones."""
    dims = column * 2 if PAIRED else column
    places, inside = rows[:, None] + dims[None, :], is_row[:, None] & (column < HALF)[None, :]
    first = tl.load(places, mask=inside, other=0.0)
    second = tl.load(places + (1 if PAIRED else HALF), mask=inside, other=0.0)
    return first.to(DTYPE), second.to(DTYPE)


@triton.jit
def store_halves(rows, first, second, is_row, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PAIRED: tl.constexpr):
    """Store them where `load_query` would find them."""
    column = tl.arange(0, HALF_BLOCK)
    dims = column * 2 if PAIRED else column
    places, inside = rows[:, None] + dims[None, :], is_row[:, None] & (column < HALF)[None, :]
    tl.store(places, first.to(rows.dtype.element_ty), mask=inside)
    tl.store(places + (1 if PAIRED else HALF), second.to(rows.dtype.element_ty), mask=inside)
