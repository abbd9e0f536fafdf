"""The kernels of `hopper_latent`: attention to latents, for Hopper, in Gluon, as they tell warps apart.

A program has 64 rows, heads of a token or of several, and walks tiles of 64 tokens. A tile comes through the copy
engine once, in three pieces: the lower and the upper half of the latents, and what is rotated. One group of four warps
makes scores and weights of them, and leaves these in shared memory with what shrinks the sums; two groups have half of
the sums each, as 64 x 512 do not fit into the registers of one. So scores of a tile are made while the values of the
one before are summed up. Each piece is asked for again as soon as the last product with it is over. FP8 comes as it is,
and who sums up a half widens it first. Shares of a decode step are those of `latent_attention_kernels.py`, and so are
the parts that they leave. Tokens that rows chose lie anywhere: four warps gather them, a row of memory after the other,
where the copy engine would bring pages.
"""

from __future__ import annotations

from typing import Any, Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

ROWS: Final = gl.constexpr(64)  # of a program: heads, and padding
KEYS: Final = gl.constexpr(64)  # tokens of a tile
HALF: Final = gl.constexpr(256)  # of a latent: what a group of warps sums up, in half of its registers
QUARTER: Final = gl.constexpr(128)  # what a product of theirs has: twice that is too much for the compiler
ROPE: Final = gl.constexpr(64)  # dimensions that rotate
KEY_DIM: Final = gl.constexpr(576)
BOX_DIMS: Final = gl.constexpr(64)  # what the copy engine brings at once of a row: 128 bytes, its widest pattern
REQUESTS_A_LOOK: Final = gl.constexpr(128)
PIECES: Final = gl.constexpr(3)  # of a tile
LOWER: Final = gl.constexpr(0)
UPPER: Final = gl.constexpr(1)
ROTATED: Final = gl.constexpr(2)
SCORES: Final = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
SUMS: Final = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
GATHER_WARPS: Final = gl.constexpr(4)
NARROW_STAGES: Final = gl.constexpr(2)  # tiles of FP8 that are there or come
TILE: Final = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
NARROW_TILE: Final = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2))
WIDEN: Final = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
STAGED: Final = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
LINES: Final = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
COPY: Final = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


def rows_by_boxes(kv: Any, shape: list[int], box: list[int], *, narrow: bool) -> Any:
    """Return what the copy engine reads rows by that follow each other in memory."""
    return TensorDescriptor(kv, shape, [shape[1], 1], box, (NARROW_TILE if narrow else TILE).value)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _places(rows, first_head, stride, HEADS: gl.constexpr, DIM: gl.constexpr):
    """Where rows of a tile are behind its first token: heads of a token, and then of the next."""
    return (first_head + rows) // HEADS * stride + (first_head + rows) % HEADS * DIM


@gluon.jit
def _following(seq_lens, request, request_end, batch_size):
    """The next request, and where its tiles begin and end on the line of all."""
    seq_len = gl.load(seq_lens + request + 1, mask=request + 1 < batch_size, other=0)
    return request + 1, request_end, request_end + gl.maximum((seq_len + KEYS - 1) // KEYS, 1)


@gluon.jit
def _num_tokens(seq_lens, request, CHOSEN: gl.constexpr):
    """How many a request has, or a row at most attends to."""
    seq_len = gl.load(seq_lens + request)
    return gl.minimum(seq_len, CHOSEN) if CHOSEN > 0 else seq_len


@gluon.jit
def _arrived(barrier, parity, CHOSEN: gl.constexpr):
    """Wait for what is brought, which products may read then: threads that gather are not the copy engine."""
    mbarrier.wait(barrier, parity)
    if CHOSEN > 0:
        fence_async_shared()


@gluon.jit
def _copy_piece(
    kv,
    rows,
    ring,
    full,
    empty,
    stage,
    parity,
    PIECE: gl.constexpr,
    FIRST: gl.constexpr,  # of its dimensions
    BOX_TOKENS: gl.constexpr,
):
    """`ring`: boxes of `BOX_TOKENS` and 64 dimensions; those of equal dimensions follow each other."""
    PAGES: gl.constexpr = KEYS // BOX_TOKENS
    PARTS: gl.constexpr = 1 if PIECE == ROTATED else HALF // BOX_DIMS
    barrier = full.index(stage * PIECES + PIECE)
    mbarrier.wait(empty.index(stage * PIECES + PIECE), parity ^ 1)
    mbarrier.expect(barrier, KEYS * PARTS * BOX_DIMS * 2)
    for part in gl.static_range(PARTS):
        for i in gl.static_range(PAGES):
            tma.async_copy_global_to_shared(
                kv,
                [rows[i], FIRST + part * BOX_DIMS],
                barrier,
                ring.index((stage * PARTS + part) * PAGES + i),
            )


@gluon.jit
def _copy_narrow(
    kv,
    rows,
    narrow,
    came,
    gone,
    count,
    BOX_TOKENS: gl.constexpr,
):
    """Bring a whole tile of FP8."""
    PAGES: gl.constexpr = KEYS // BOX_TOKENS
    BOXES: gl.constexpr = KEY_DIM // BOX_DIMS
    stage, parity = count % NARROW_STAGES, count // NARROW_STAGES & 1
    mbarrier.wait(gone.index(stage), parity ^ 1)
    mbarrier.expect(came.index(stage), KEYS * KEY_DIM)
    for box in gl.static_range(BOXES):
        for i in gl.static_range(PAGES):
            tma.async_copy_global_to_shared(
                kv,
                [rows[i], box * BOX_DIMS],
                came.index(stage),
                narrow.index((stage * BOXES + box) * PAGES + i),
            )


@gluon.jit
def _copy(
    kv,
    page_table,
    seq_lens,
    batch_size,
    table_stride,
    tile,
    share_end,
    request,
    request_start,
    request_end,
    lower,
    upper,
    rotated,
    narrow,
    full,
    empty,
    came,
    gone,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    BOX_TOKENS: gl.constexpr,
    NARROW: gl.constexpr,
):
    """Bring a share's tiles. Pages behind the end of a request are zeros."""
    PAGES: gl.constexpr = KEYS // BOX_TOKENS
    count = 0
    while tile < share_end:
        seq_len = gl.load(seq_lens + request)
        table = page_table + request.to(gl.int64) * table_stride
        num_pages = (seq_len + PAGE_SIZE - 1) // PAGE_SIZE
        next_tile = gl.minimum(share_end, request_end)
        for block in range(tile - request_start, next_tile - request_start):
            rows = ()
            for i in gl.static_range(PAGES):  # all are asked for before the first is used
                token = block * KEYS + i * BOX_TOKENS
                page = gl.load(table + token // PAGE_SIZE, mask=token // PAGE_SIZE < num_pages, other=-1)
                rows = rows + (page * PAGE_ROWS + token % PAGE_SIZE,)  # type: ignore[assignment]  # noqa: RUF005
            stage, parity = count % STAGES, count // STAGES & 1
            if NARROW:
                _copy_narrow(kv, rows, narrow, came, gone, count, BOX_TOKENS)
            else:
                _copy_piece(kv, rows, rotated, full, empty, stage, parity, ROTATED, 2 * HALF, BOX_TOKENS)
                _copy_piece(kv, rows, lower, full, empty, stage, parity, LOWER, 0, BOX_TOKENS)
                _copy_piece(kv, rows, upper, full, empty, stage, parity, UPPER, HALF, BOX_TOKENS)
            count += 1
        tile = next_tile
        request, request_start, request_end = _following(seq_lens, request, request_end, batch_size)


@gluon.jit
def _gather_piece(
    kv,
    places,  # [KEYS]: where each token begins
    exists,
    ring,
    full,
    empty,
    stage,
    parity,
    PIECE: gl.constexpr,
    FIRST: gl.constexpr,  # of its dimensions
):
    target = ring.index(stage)
    mbarrier.wait(empty.index(stage * PIECES + PIECE), parity ^ 1)
    dims = FIRST + gl.arange(0, target.shape[1], layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(target, kv + (places[:, None] + dims[None, :]), mask=exists[:, None])
    async_copy.mbarrier_arrive(full.index(stage * PIECES + PIECE), increment_count=False)


@gluon.jit
def _gather_narrow(kv, places, exists, narrow, came, gone, count):
    """Bring a whole tile of FP8."""
    BOXES: gl.constexpr = KEY_DIM // BOX_DIMS
    stage, parity = count % NARROW_STAGES, count // NARROW_STAGES & 1
    mbarrier.wait(gone.index(stage), parity ^ 1)
    for i in gl.static_range(BOXES):
        dims = i * BOX_DIMS + gl.arange(0, BOX_DIMS, layout=gl.SliceLayout(0, WIDEN))
        box = narrow.index(stage * BOXES + i)
        async_copy.async_copy_global_to_shared(box, kv + (places[:, None] + dims[None, :]), mask=exists[:, None])
    async_copy.mbarrier_arrive(came.index(stage), increment_count=False)


@gluon.jit
def _gather(
    kv,
    slots,  # that the row chose
    num_slots,
    tile,
    share_end,
    lower,
    upper,
    rotated,
    narrow,
    full,
    empty,
    came,
    gone,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    NARROW: gl.constexpr,
):
    """Bring a share's tiles of chosen tokens."""
    KEYS_OF_THREADS: gl.constexpr = gl.SliceLayout(1, WIDEN if NARROW else COPY)
    keys = gl.arange(0, KEYS, layout=KEYS_OF_THREADS)
    slot = gl.load(slots + tile * KEYS + keys, mask=tile * KEYS + keys < num_slots, other=0)
    count = 0
    while tile < share_end:
        exists = tile * KEYS + keys < num_slots
        places = ((slot // PAGE_SIZE).to(gl.int64) * PAGE_ROWS + slot % PAGE_SIZE) * KEY_DIM
        tile = tile + 1
        # ahead: the next tile's copies need it
        slot = gl.load(slots + tile * KEYS + keys, mask=tile * KEYS + keys < num_slots, other=0)
        stage, parity = count % STAGES, count // STAGES & 1
        if NARROW:
            _gather_narrow(kv, places, exists, narrow, came, gone, count)
        else:
            _gather_piece(kv, places, exists, rotated, full, empty, stage, parity, ROTATED, 2 * HALF)
            _gather_piece(kv, places, exists, lower, full, empty, stage, parity, LOWER, 0)
            _gather_piece(kv, places, exists, upper, full, empty, stage, parity, UPPER, HALF)
        count += 1


@gluon.jit
def _bring(
    kv,
    page_table,
    seq_lens,
    batch_size,
    table_stride,
    tile,
    share_end,
    request,
    request_start,
    request_end,
    lower,
    upper,
    rotated,
    narrow,
    full,
    empty,
    came,
    gone,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    BOX_TOKENS: gl.constexpr,
    NARROW: gl.constexpr,
    CHOSEN: gl.constexpr,
):
    """What the last group does; `CHOSEN` as of `_run`. Pages go into boxes, and what is gathered into whole pieces."""
    if CHOSEN > 0:
        slots = page_table + request.to(gl.int64) * table_stride
        num_slots = _num_tokens(seq_lens, request, CHOSEN)
        _gather(
            kv, slots, num_slots, tile, share_end, lower, upper, rotated, narrow,
            full, empty, came, gone, STAGES, PAGE_SIZE, PAGE_ROWS, NARROW,
        )  # fmt: skip
    else:
        _copy(
            kv, page_table, seq_lens, batch_size, table_stride, tile, share_end, request, request_start, request_end,
            lower, upper, rotated, narrow, full, empty, came, gone, STAGES, PAGE_SIZE, PAGE_ROWS, BOX_TOKENS, NARROW,
        )  # fmt: skip


@gluon.jit
def _ask_for_queries(
    tokens,  # where the first token's begin
    target,
    first_head,
    num_rows,
    stride,
    FIRST: gl.constexpr,  # dimension
    HEADS: gl.constexpr,
    NARROW: gl.constexpr,
):
    DIM: gl.constexpr = target.shape[1]
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    places = _places(rows, first_head, stride, HEADS, KEY_DIM)[:, None]
    is_row = (rows < num_rows)[:, None]
    if NARROW:  # their type is not that of products
        PARTS: gl.constexpr = DIM // BOX_DIMS
        boxes = target._reinterpret(target.dtype, [PARTS, ROWS, BOX_DIMS], TILE)
        for part in gl.static_range(PARTS):
            some = FIRST + part * BOX_DIMS + gl.arange(0, BOX_DIMS, layout=gl.SliceLayout(0, COPY))
            boxes.index(part).store(gl.load(tokens + places + some[None, :], mask=is_row, other=0.0).to(target.dtype))
    else:
        dims = FIRST + gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
        async_copy.async_copy_global_to_shared(target, tokens + places + dims[None, :], mask=is_row)


@gluon.jit
def _clear_end(ring, stage, seen, PARTS: gl.constexpr):
    """Zeros behind the end of a request: what is there may be NaN, whose product with 0 is NaN."""
    keys = gl.arange(0, KEYS, layout=gl.SliceLayout(1, COPY))
    for part in gl.static_range(PARTS):
        box = ring.index(stage * PARTS + part)
        box.store(gl.where((keys < seen)[:, None], box.load(COPY), 0.0).to(ring.dtype))
    fence_async_shared()


@gluon.jit
def _widen_piece(
    narrow,
    ring,
    full,
    first,  # box of the tile in `narrow`
    seen,
    PIECE: gl.constexpr,
):
    """Make products' operands of FP8."""
    PARTS: gl.constexpr = 1 if PIECE == ROTATED else HALF // BOX_DIMS
    found = ()
    for part in gl.static_range(PARTS):  # all are read before the first is written
        found = found + (narrow.index(first + part).load(WIDEN),)  # type: ignore[assignment]  # noqa: RUF005
    for part in gl.static_range(PARTS):
        ring.index(part).store(found[part].to(ring.dtype))
    if seen < KEYS:
        _clear_end(ring, 0, seen, PARTS)
    fence_async_shared()
    mbarrier.arrive(full.index(PIECE))


@gluon.jit
def _widen(WHICH: gl.constexpr, narrow, boxes, rotated_boxes, full, came, gone, count, seen):
    """Do so with a half of a tile; what is rotated goes with the lower one.

    There is one place for what comes out. Nobody reads the tile before any more: its weights were given when its scores
    were made, and its values are this group's own.
    """
    PARTS: gl.constexpr = HALF // BOX_DIMS
    BOXES: gl.constexpr = KEY_DIM // BOX_DIMS
    stage = count % NARROW_STAGES
    mbarrier.wait(came.index(stage), count // NARROW_STAGES & 1)
    if WHICH == LOWER:
        _widen_piece(narrow, rotated_boxes, full, stage * BOXES + 2 * PARTS, seen, ROTATED)
    _widen_piece(narrow, boxes, full, stage * BOXES + WHICH * PARTS, seen, WHICH)
    mbarrier.arrive(gone.index(stage))


@gluon.jit
def _store_quarter(
    sums,
    staging,  # queries that nobody reads any more
    own_tokens,  # of `out`, where the first token's quarters begin
    part_rows,  # of what shares leave
    alone,  # whether this share has all of the request
    first_head,
    num_rows,
    stride,
    HEADS: gl.constexpr,
    EXTEND: gl.constexpr,
):
    """By way of shared memory: products leave eight bytes of a row to a thread, and memory is written by lines."""
    staged = staging._reinterpret(gl.float32, [ROWS, QUARTER], STAGED)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
    dims = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, LINES))
    is_row = (rows < num_rows)[:, None]
    own = own_tokens + (_places(rows, first_head, stride, HEADS, 2 * HALF)[:, None] + dims[None, :])
    staged.store(sums)
    values = staged.load(LINES)
    if EXTEND:
        gl.store(own, values.to(own_tokens.dtype.element_ty), mask=is_row)
    else:
        if alone:
            gl.store(own, values.to(own_tokens.dtype.element_ty), mask=is_row)
        else:
            gl.store(part_rows + (rows[:, None] * (2 * HALF) + dims[None, :]), values, mask=is_row)


@gluon.jit
def _turn(
    queries_lower,
    queries_upper,
    queries_rotated,
    lower,
    upper,
    rotated,
    largest,
    total,
    score_scale,
    seen,  # tokens of this tile that each row sees; may be more than it has, or fewer than none
    count,
    handed,
    full,
    empty,
    given,
    taken,
    shared_weights,
    shared_shrink,
    MASK: gl.constexpr,
    STAGES: gl.constexpr,
    CHOSEN: gl.constexpr,
):
    """Weights of a tile, left for those who sum up."""
    stage, parity = count % STAGES, count // STAGES & 1
    scores = gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES)
    _arrived(full.index(stage * PIECES + ROTATED), parity, CHOSEN)
    scores = warpgroup_mma(queries_rotated, rotated.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    _arrived(full.index(stage * PIECES + LOWER), parity, CHOSEN)
    scores = warpgroup_mma(queries_lower, lower.index(stage).permute((1, 0)), scores, is_async=True)
    _arrived(full.index(stage * PIECES + UPPER), parity, CHOSEN)
    scores = warpgroup_mma(queries_upper, upper.index(stage).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(empty.index(stage * PIECES + ROTATED))
    if MASK:
        keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(keys[None, :] < seen[:, None], scores, -float("inf"))
    new_largest = gl.maximum(largest, gl.max(scores, axis=1) * score_scale)
    # a row that has seen nothing yet: minus infinity less itself is not a number
    shift = gl.where(new_largest == -float("inf"), 0.0, new_largest) if MASK else new_largest
    weights = gl.exp2(scores * score_scale - shift[:, None])
    shrink = gl.exp2(largest - shift)
    mbarrier.wait(taken, (handed & 1) ^ 1)
    shared_weights.store(weights.to(shared_weights.dtype))
    shared_shrink.store(shrink)
    fence_async_shared()
    mbarrier.arrive(given)
    return new_largest, total * shrink + gl.sum(weights, axis=1)


@gluon.jit
def _part_of(request_start, request_end, worker, share, HEADS: gl.constexpr, CHOSEN: gl.constexpr):
    """Whether a share has all of a request, and where its part begins, of all rows that shares leave.

    A share holds two parts of requests at most: one that came in, slot 0, and one that goes on, slot 1. Of a row that
    chose, it has one.
    """
    if CHOSEN > 0:
        alone, slot = share == request_end, worker
    else:
        first_worker = request_start // share
        alone = first_worker == (request_end - 1) // share
        slot = worker * 2 + (worker == first_worker).to(gl.int32)
    return alone, slot * HEADS


@gluon.jit
def _weigh(
    q,
    seq_lens,
    part_maxima,
    part_sums,
    batch_size,
    q_stride,
    score_scale,
    value_scale,
    worker,
    share,
    tile,
    share_end,
    request,
    request_start,
    request_end,
    token,  # the tile's first, if EXTEND
    first_head,
    num_rows,
    first_seen,  # tokens that the tile's first one sees, if EXTEND
    queries_lower,
    queries_upper,
    queries_rotated,
    lower,
    upper,
    rotated,
    full,
    empty,
    given,
    taken,
    shared_weights,
    shared_shrink,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    NARROW: gl.constexpr,
    EXTEND: gl.constexpr,
    CHOSEN: gl.constexpr,
):
    """What the first group does: weights of tiles, and at a request's end what its sums are multiplied by."""
    count = 0
    handed = 0
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    while tile < share_end:
        mbarrier.wait(taken, (handed & 1) ^ 1)  # sums went to memory by way of the last queries
        tokens = q + (token if EXTEND else request).to(gl.int64) * q_stride
        _ask_for_queries(tokens, queries_rotated, first_head, num_rows, q_stride, 2 * HALF, HEADS, NARROW)
        _ask_for_queries(tokens, queries_lower, first_head, num_rows, q_stride, 0, HEADS, NARROW)
        _ask_for_queries(tokens, queries_upper, first_head, num_rows, q_stride, HALF, HEADS, NARROW)
        async_copy.commit_group()
        seq_len = _num_tokens(seq_lens, request, CHOSEN)
        all_see = first_seen if EXTEND else seq_len
        seen = gl.minimum(all_see + (first_head + rows) // HEADS, seq_len)
        next_tile = gl.minimum(share_end, request_end)
        begin, end = tile - request_start, next_tile - request_start
        whole = gl.minimum(gl.maximum(all_see // KEYS, begin), end)  # the first tile that not every row sees all of
        largest = gl.full([ROWS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, SCORES))
        async_copy.wait_group(0)
        fence_async_shared()
        for _block in range(begin, whole):
            largest, total = _turn(
                queries_lower, queries_upper, queries_rotated, lower, upper, rotated,
                largest, total, score_scale, seen, count, handed,
                full, empty, given, taken, shared_weights, shared_shrink, False, STAGES, CHOSEN,
            )  # fmt: skip
            count += 1
            handed += 1
        for block in range(whole, end):
            largest, total = _turn(
                queries_lower, queries_upper, queries_rotated, lower, upper, rotated,
                largest, total, score_scale, seen - block * KEYS, count, handed,
                full, empty, given, taken, shared_weights, shared_shrink, True, STAGES, CHOSEN,
            )  # fmt: skip
            count += 1
            handed += 1
        alone, place = _part_of(request_start, request_end, worker, share, HEADS, CHOSEN)
        factor = value_scale / gl.where(total == 0.0, 1.0, total)
        mbarrier.wait(taken, (handed & 1) ^ 1)
        shared_shrink.store(factor if EXTEND else gl.where(alone, factor, 1.0))
        mbarrier.arrive(given)
        handed += 1
        if not EXTEND:
            left = (rows < num_rows) & (not alone)
            gl.store(part_maxima + place + first_head + rows, largest, mask=left)
            gl.store(part_sums + place + first_head + rows, total, mask=left)
        tile = next_tile
        request, request_start, request_end = _following(seq_lens, request, request_end, batch_size)


@gluon.jit
def _sum_up(
    WHICH: gl.constexpr,  # half of the latents
    seq_lens,
    out,
    part_values,
    batch_size,
    out_stride,
    worker,
    share,
    tile,
    share_end,
    request,
    request_start,
    request_end,
    token,
    first_head,
    num_rows,
    staging,  # the queries' half
    values,  # the half, in quarters
    narrow,
    boxes,  # of the half
    rotated_boxes,
    full,
    empty,
    came,
    gone,
    given,
    taken,
    shared_weights,
    shared_shrink,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    NARROW: gl.constexpr,
    EXTEND: gl.constexpr,
    CHOSEN: gl.constexpr,
):
    """What the other groups do: half of the sums each."""
    count = 0
    handed = 0
    while tile < share_end:
        seq_len = _num_tokens(seq_lens, request, CHOSEN)
        next_tile = gl.minimum(share_end, request_end)
        first = gl.zeros([ROWS, QUARTER], gl.float32, layout=SUMS)
        second = gl.zeros([ROWS, QUARTER], gl.float32, layout=SUMS)
        for block in range(tile - request_start, next_tile - request_start):
            stage, parity = count % STAGES, count // STAGES & 1
            seen = seq_len - block * KEYS
            if NARROW:
                _widen(WHICH, narrow, boxes, rotated_boxes, full, came, gone, count, seen)
            _arrived(full.index(stage * PIECES + WHICH), parity, CHOSEN)
            mbarrier.wait(given, handed & 1)
            shrink = shared_shrink.load(gl.SliceLayout(1, SUMS))
            first, second = first * shrink[:, None], second * shrink[:, None]
            if not NARROW and seen < KEYS:
                _clear_end(boxes, stage, seen, HALF // BOX_DIMS)
            first = warpgroup_mma(shared_weights, values.index(stage * 2), first, is_async=True)
            second = warpgroup_mma(shared_weights, values.index(stage * 2 + 1), second, is_async=True)
            first, second = warpgroup_mma_wait(0, deps=[first, second])
            mbarrier.arrive(empty.index(stage * PIECES + WHICH))
            mbarrier.arrive(taken)
            count += 1
            handed += 1
        alone, place = _part_of(request_start, request_end, worker, share, HEADS, CHOSEN)
        own_tokens = out + (token if EXTEND else request).to(gl.int64) * out_stride + WHICH * HALF
        part_rows = part_values + (place + first_head).to(gl.int64) * (2 * HALF) + WHICH * HALF
        mbarrier.wait(given, handed & 1)
        factor = shared_shrink.load(gl.SliceLayout(1, SUMS))
        _store_quarter(
            first * factor[:, None], staging, own_tokens, part_rows,
            alone, first_head, num_rows, out_stride, HEADS, EXTEND,
        )  # fmt: skip
        _store_quarter(
            second * factor[:, None], staging, own_tokens + QUARTER, part_rows + QUARTER,
            alone, first_head, num_rows, out_stride, HEADS, EXTEND,
        )  # fmt: skip
        mbarrier.arrive(taken)
        handed += 1
        tile = next_tile
        request, request_start, request_end = _following(seq_lens, request, request_end, batch_size)


@gluon.jit
def _run(
    q,
    kv,
    page_table,
    seq_lens,
    out,
    part_values,
    part_maxima,
    part_sums,
    batch_size,
    q_stride,
    out_stride,
    table_stride,
    score_scale,
    value_scale,
    worker,
    share,
    tile,
    share_end,
    request,
    request_start,
    request_end,
    token,
    first_head,
    num_rows,
    first_seen,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    BOX_TOKENS: gl.constexpr,
    NARROW: gl.constexpr,
    DTYPE: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    EXTEND: gl.constexpr,
    CHOSEN: gl.constexpr,  # tokens of a row at most, whose slots `page_table` has; 0: requests' own, by pages
):
    """Set all groups of warps to a program's tiles."""
    COPY_WARPS: gl.constexpr = GATHER_WARPS if CHOSEN > 0 else 1
    COPY_ARRIVALS: gl.constexpr = GATHER_WARPS * 32 if CHOSEN > 0 else 1  # each thread tells of its own copies
    PARTS: gl.constexpr = HALF // BOX_DIMS
    PAGES: gl.constexpr = KEYS // BOX_TOKENS
    BOXES: gl.constexpr = NARROW_STAGES * (KEY_DIM // BOX_DIMS) if NARROW else 1
    queries_lower = gl.allocate_shared_memory(DTYPE, [ROWS, HALF], TILE)
    queries_upper = gl.allocate_shared_memory(DTYPE, [ROWS, HALF], TILE)
    queries_rotated = gl.allocate_shared_memory(DTYPE, [ROWS, ROPE], TILE)
    lower = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, HALF], TILE)
    upper = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, HALF], TILE)
    rotated = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, ROPE], TILE)
    shared_weights = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], TILE)
    LINE_OF_ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared_shrink = gl.allocate_shared_memory(gl.float32, [ROWS], LINE_OF_ROWS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * PIECES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES * PIECES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES * PIECES):
        mbarrier.init(full.index(i), count=1 if NARROW else COPY_ARRIVALS)
        mbarrier.init(empty.index(i), count=1)
    narrow = gl.allocate_shared_memory(gl.float8e4nv, [BOXES, KEYS, BOX_DIMS], NARROW_TILE) if NARROW else rotated
    came = gl.allocate_shared_memory(gl.int64, [NARROW_STAGES, 1], mbarrier.MBarrierLayout())
    gone = gl.allocate_shared_memory(gl.int64, [NARROW_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NARROW_STAGES):
        mbarrier.init(came.index(i), count=COPY_ARRIVALS)
        mbarrier.init(gone.index(i), count=2)
    mbarrier.init(given, count=1)
    mbarrier.init(taken, count=2)
    fence_async_shared()
    lower_quarters = lower._reinterpret(DTYPE, [STAGES * 2, KEYS, QUARTER], TILE)
    upper_quarters = upper._reinterpret(DTYPE, [STAGES * 2, KEYS, QUARTER], TILE)
    lower_boxes = lower._reinterpret(DTYPE, [STAGES * PARTS, KEYS, BOX_DIMS], TILE)
    upper_boxes = upper._reinterpret(DTYPE, [STAGES * PARTS, KEYS, BOX_DIMS], TILE)
    BROUGHT: gl.constexpr = [STAGES * PARTS * PAGES, BOX_TOKENS, BOX_DIMS]
    lower_pages = lower if CHOSEN > 0 else lower._reinterpret(DTYPE, BROUGHT, TILE)
    upper_pages = upper if CHOSEN > 0 else upper._reinterpret(DTYPE, BROUGHT, TILE)
    narrow_pages = (
        narrow._reinterpret(gl.float8e4nv, [BOXES * PAGES, BOX_TOKENS, BOX_DIMS], NARROW_TILE) if NARROW else narrow
    )
    rotated_pages = rotated._reinterpret(DTYPE, [STAGES * PAGES, BOX_TOKENS, BOX_DIMS], TILE)
    # fmt: off
    gl.warp_specialize(
        [
            (_weigh, (q, seq_lens, part_maxima, part_sums, batch_size, q_stride, score_scale, value_scale,
                      worker, share, tile, share_end, request, request_start, request_end,
                      token, first_head, num_rows, first_seen,
                      queries_lower, queries_upper, queries_rotated, lower, upper, rotated,
                      full, empty, given, taken, shared_weights, shared_shrink,
                      HEADS, STAGES, NARROW, EXTEND, CHOSEN)),
            (_sum_up, (LOWER, seq_lens, out, part_values, batch_size, out_stride, worker, share, tile, share_end,
                       request, request_start, request_end, token, first_head, num_rows, queries_lower,
                       lower_quarters, narrow, lower_boxes, rotated, full, empty, came, gone, given, taken,
                       shared_weights, shared_shrink, HEADS, STAGES, NARROW, EXTEND, CHOSEN)),
            (_sum_up, (UPPER, seq_lens, out, part_values, batch_size, out_stride, worker, share, tile, share_end,
                       request, request_start, request_end, token, first_head, num_rows, queries_upper,
                       upper_quarters, narrow, upper_boxes, rotated, full, empty, came, gone, given, taken,
                       shared_weights, shared_shrink, HEADS, STAGES, NARROW, EXTEND, CHOSEN)),
            (_bring, (kv, page_table, seq_lens, batch_size, table_stride, tile, share_end,
                      request, request_start, request_end, lower_pages, upper_pages, rotated_pages, narrow_pages,
                      full, empty, came, gone, STAGES, PAGE_SIZE, PAGE_ROWS, BOX_TOKENS, NARROW, CHOSEN)),
        ],
        [4, 4, COPY_WARPS],
        [REGISTERS, REGISTERS, COPY_REGISTERS],
    )
    # fmt: on


@gluon.jit(  # what differs from step to step must not be compiled for while serving
    do_not_specialize=["batch_size", "table_stride", "num_workers"],
    do_not_specialize_on_alignment=["page_table", "seq_lens"],
)
def hopper_latent_decode_kernel(
    q,  # [batch, HEADS, 576]
    kv,  # descriptor of rows of 576
    page_table,
    seq_lens,
    out,  # [batch, HEADS, 512]
    part_values,  # [slots, HEADS, 512]
    part_maxima,  # [slots, HEADS], of exponents of two
    part_sums,  # like part_maxima
    batch_size,
    q_stride,
    out_stride,
    table_stride,
    num_workers,  # shares of each tile of heads
    score_scale,  # to powers of two
    value_scale,
    HEADS: gl.constexpr,
    HEAD_TILES: gl.constexpr,
    BATCH: gl.constexpr,  # the batch and more
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,  # from a page to the next
    BOX_TOKENS: gl.constexpr,
    NARROW: gl.constexpr,  # whether pages are FP8
    DTYPE: gl.constexpr,  # of products
    REGISTERS: gl.constexpr,  # of a thread that sums up
    COPY_REGISTERS: gl.constexpr,
    EARLY: gl.constexpr,  # whether the sum of parts is launched while this one runs
):
    if EARLY:
        gdc_launch_dependents()
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    GROUP: gl.constexpr = HEADS // HEAD_TILES
    head_tile, worker = gl.program_id(0) % HEAD_TILES, gl.program_id(0) // HEAD_TILES
    requests = gl.arange(0, BATCH, layout=LINE)
    lens = gl.load(seq_lens + requests, mask=requests < batch_size, other=0)
    tiles = gl.where(requests < batch_size, gl.maximum((lens + KEYS - 1) // KEYS, 1), 0)
    ends = gl.associative_scan(tiles, 0, _add)
    num_tiles = gl.max(ends, axis=0)
    share = (num_tiles + num_workers - 1) // num_workers
    tile = worker * share
    share_end = gl.minimum(tile + share, num_tiles)
    request = gl.sum((ends <= tile).to(gl.int32), axis=0)
    request_end = gl.sum(gl.where(requests == request, ends, 0), axis=0)
    request_start = request_end - gl.sum(gl.where(requests == request, tiles, 0), axis=0)
    _run(
        q, kv, page_table, seq_lens, out, part_values, part_maxima, part_sums,
        batch_size, q_stride, out_stride, table_stride, score_scale, value_scale,
        worker, share, tile, share_end, request, request_start, request_end,
        request, head_tile * GROUP, gl.to_tensor(GROUP), gl.to_tensor(0),
        HEADS, STAGES, PAGE_SIZE, PAGE_ROWS, BOX_TOKENS, NARROW, DTYPE, REGISTERS, COPY_REGISTERS, False, 0,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["batch_size", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "extend_starts"],
)
def hopper_latent_extend_kernel(
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
    score_scale,
    value_scale,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    BOX_TOKENS: gl.constexpr,
    NARROW: gl.constexpr,
    DTYPE: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Tiles of tokens' heads are found as in `extend_attention.py`; each is a program."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    item = gl.num_programs(0) - 1 - gl.program_id(0)  # the longest first: ends of prompts see the most keys
    count = 0
    for first in range(0, batch_size, REQUESTS_A_LOOK):
        requests = first + gl.arange(0, REQUESTS_A_LOOK, layout=LINE)
        starts = gl.load(extend_starts + requests, mask=requests < batch_size, other=0)
        begun = (starts * HEADS // ROWS + requests <= item) & (requests < batch_size)
        count += gl.sum(begun.to(gl.int32), axis=0)
    request = count - 1
    begin = gl.load(extend_starts + request)
    extend_len = gl.load(extend_starts + request + 1) - begin
    seq_len = gl.load(seq_lens + request)
    first_row = (item - begin * HEADS // ROWS - request) * ROWS
    num_rows = gl.minimum(extend_len * HEADS - first_row, ROWS)  # none, or fewer: there is no such tile
    token, first_head = first_row // HEADS, first_row % HEADS
    first_seen = seq_len - extend_len + token + 1
    last_seen = gl.minimum(first_seen + (first_head + num_rows - 1) // HEADS, seq_len)
    nothing = gl.to_tensor(0)
    turns = gl.where(num_rows > 0, (last_seen + KEYS - 1) // KEYS, 0)
    _run(
        q, kv, page_table, seq_lens, out, out, out, out,
        batch_size, q_stride, out_stride, table_stride, score_scale, value_scale,
        nothing, gl.maximum(turns, 1), nothing, turns, request, nothing, turns,
        begin + token, first_head, num_rows, first_seen,
        HEADS, STAGES, PAGE_SIZE, PAGE_ROWS, BOX_TOKENS, NARROW, DTYPE, REGISTERS, COPY_REGISTERS, True, 0,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["lens"])
def hopper_chosen_kernel(
    q,  # [num_rows, HEADS, 576]
    kv,  # [num_pages, page, 576]
    chosen,
    lens,
    out,  # [num_rows, HEADS, 512]
    part_values,  # [num_rows, num_parts, HEADS, 512]
    part_maxima,  # [num_rows, num_parts, HEADS], of exponents of two
    part_sums,  # like part_maxima
    q_stride,
    out_stride,
    chosen_stride,
    num_parts,
    score_scale,  # to powers of two
    value_scale,
    HEADS: gl.constexpr,
    HEAD_TILES: gl.constexpr,
    NUM_KEPT: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,  # from a page to the next
    NARROW: gl.constexpr,
    DTYPE: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Rows and their parts are those of `sparse_latent_attention.py`; each is a program for each tile of heads."""
    GROUP: gl.constexpr = HEADS // HEAD_TILES
    head_tile, worker = gl.program_id(0) % HEAD_TILES, gl.program_id(0) // HEAD_TILES
    row, part = worker // num_parts, worker % num_parts
    count = _num_tokens(lens, row, NUM_KEPT)
    num_tiles = gl.maximum((count + KEYS - 1) // KEYS, 1)  # a row of nothing has zeros
    share = (num_tiles + num_parts - 1) // num_parts
    tile = part * share
    nothing = gl.to_tensor(0)
    _run(
        q, kv, chosen, lens, out, part_values, part_maxima, part_sums,
        row + 1, q_stride, out_stride, chosen_stride, score_scale, value_scale,
        worker, share, tile, gl.minimum(tile + share, num_tiles), row, nothing, num_tiles,
        row, head_tile * GROUP, gl.to_tensor(GROUP), nothing,
        HEADS, STAGES, PAGE_SIZE, PAGE_ROWS, KEYS, NARROW, DTYPE, REGISTERS, COPY_REGISTERS, False, NUM_KEPT,
    )  # fmt: skip
