"""The kernel of `hopper_latent`: a decode step's attention to latents, for Hopper, in Gluon, as it tells warps apart.

A program has 64 rows, heads of one token, and walks tiles of 64 tokens. A tile comes through the copy engine once, in
three pieces: the lower and the upper half of the latents, and what is rotated. One group of four warps makes the scores
(64 rows of products each: two groups would make each score twice), weights of them, and the lower half of the sums; it
leaves weights and what shrinks the sums in shared memory, where a second group takes them for the upper half. Each
piece is asked for again as soon as the last product with it is over, so that the next tile comes while this one is
multiplied. Shares of a step are those of `latent_attention_kernels.py`, and so are the parts that they leave.
"""

from __future__ import annotations

from typing import Final

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

ROWS: Final = gl.constexpr(64)  # of a program: heads, and padding
KEYS: Final = gl.constexpr(64)  # tokens of a tile
HALF: Final = gl.constexpr(256)  # of a latent: what a group of warps sums up, in half of its registers
ROPE: Final = gl.constexpr(64)  # dimensions that rotate
KEY_DIM: Final = gl.constexpr(576)
BOX_DIMS: Final = gl.constexpr(64)  # what the copy engine brings at once of a row: 128 bytes, its widest pattern
PIECES: Final = gl.constexpr(3)  # of a tile
LOWER: Final = gl.constexpr(0)
UPPER: Final = gl.constexpr(1)
ROTATED: Final = gl.constexpr(2)
SCORES: Final = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
SUMS: Final = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
WEIGHTS: Final = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=SUMS.value, k_width=2))
NARROW_STAGES: Final = gl.constexpr(2)  # tiles of FP8 that are there or come
TILE: Final = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
NARROW_TILE: Final = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2))
WIDEN: Final = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
STAGED: Final = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
LINES: Final = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
COPY: Final = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _following(seq_lens, request, request_end, batch_size):
    """The next request, and where its tiles begin and end on the line of all."""
    seq_len = gl.load(seq_lens + request + 1, mask=request + 1 < batch_size, other=0)
    return request + 1, request_end, request_end + gl.maximum((seq_len + KEYS - 1) // KEYS, 1)


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
def _ask_for_queries(q_rows, target, is_row, FIRST: gl.constexpr, NARROW: gl.constexpr):
    """`q_rows`: where a token's heads begin; a head follows the other."""
    DIM: gl.constexpr = target.shape[1]
    if NARROW:  # their type is not that of products
        PARTS: gl.constexpr = DIM // BOX_DIMS
        boxes = target._reinterpret(target.dtype, [PARTS, ROWS, BOX_DIMS], TILE)
        for part in gl.static_range(PARTS):
            rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
            dims = gl.arange(0, BOX_DIMS, layout=gl.SliceLayout(0, COPY))
            places = q_rows + (FIRST + part * BOX_DIMS) + rows[:, None] * KEY_DIM + dims[None, :]
            boxes.index(part).store(gl.load(places, mask=is_row, other=0.0).to(target.dtype))
        return
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    places = q_rows + FIRST + rows[:, None] * KEY_DIM + dims[None, :]
    async_copy.async_copy_global_to_shared(target, places, mask=is_row)


@gluon.jit
def _clear_end(ring, stage, seen, DTYPE: gl.constexpr):
    """Zeros behind the end of a request: what is there may be NaN, whose product with 0 is NaN."""
    PARTS: gl.constexpr = HALF // BOX_DIMS
    keys = gl.arange(0, KEYS, layout=gl.SliceLayout(1, COPY))
    for part in gl.static_range(PARTS):
        box = ring.index(stage * PARTS + part)
        box.store(gl.where((keys < seen)[:, None], box.load(COPY), 0.0).to(DTYPE))
    fence_async_shared()


@gluon.jit
def _widen_piece(
    narrow,
    ring,
    full,
    empty,
    first,  # box of the tile in `narrow`
    seen,
    parity,
    PIECE: gl.constexpr,
):
    """Make products' operands of FP8; what is behind the end of a request becomes zero."""
    DTYPE: gl.constexpr = ring.dtype
    PARTS: gl.constexpr = 1 if PIECE == ROTATED else HALF // BOX_DIMS
    keys = gl.arange(0, KEYS, layout=gl.SliceLayout(1, WIDEN))
    found = ()
    for part in gl.static_range(PARTS):  # all are read before the first is written
        found = found + (narrow.index(first + part).load(WIDEN),)  # type: ignore[assignment]  # noqa: RUF005
    mbarrier.wait(empty.index(PIECE), parity ^ 1)
    for part in gl.static_range(PARTS):
        ring.index(part).store(gl.where((keys < seen)[:, None], found[part].to(DTYPE), 0.0).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(full.index(PIECE))


@gluon.jit
def _widen(narrow, lower, upper, rotated, full, empty, came, gone, count, seen):
    """Do so with a tile; there is one place for what comes out."""
    PARTS: gl.constexpr = HALF // BOX_DIMS
    BOXES: gl.constexpr = KEY_DIM // BOX_DIMS
    stage, parity = count % NARROW_STAGES, count & 1
    mbarrier.wait(came.index(stage), count // NARROW_STAGES & 1)
    _widen_piece(narrow, rotated, full, empty, stage * BOXES + 2 * PARTS, seen, parity, ROTATED)
    _widen_piece(narrow, lower, full, empty, stage * BOXES, seen, parity, LOWER)
    _widen_piece(narrow, upper, full, empty, stage * BOXES + PARTS, seen, parity, UPPER)
    mbarrier.arrive(gone.index(stage))


@gluon.jit
def _store_half(
    sums,
    staging,  # queries of this half, which nobody reads any more
    out,
    part_values,
    row_base,  # of `out`
    part_base,  # of `part_values`
    alone,  # whether this share has all of the request
    FIRST: gl.constexpr,
    GROUP: gl.constexpr,
):
    """By way of shared memory: products leave eight bytes of a row to a thread, and memory is written by lines."""
    WIDTH: gl.constexpr = HALF // 2
    staged = staging._reinterpret(gl.float32, [ROWS, WIDTH], STAGED)
    first, second = gl.split(gl.permute(gl.reshape(sums, [ROWS, 2, WIDTH]), (0, 2, 1)))
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
    dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LINES))
    places = rows[:, None] * (2 * HALF) + dims[None, :]
    is_row = (rows < GROUP)[:, None]
    for i in gl.static_range(2):
        staged.store(first if i == 0 else second)
        values = staged.load(LINES)
        if alone:
            gl.store(out + row_base + (FIRST + i * WIDTH) + places, values.to(out.dtype.element_ty), mask=is_row)
        else:
            gl.store(part_values + part_base + (FIRST + i * WIDTH) + places, values, mask=is_row)


@gluon.jit
def _turn(
    queries_lower,
    queries_upper,
    queries_rotated,
    lower,
    upper,
    rotated,
    lower_boxes,
    sums,
    largest,
    total,
    score_scale,
    seen,  # tokens of this tile that there are; may be more than it has
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
    NARROW: gl.constexpr,
):
    """Scores of a tile, and the lower half of its values."""
    DTYPE: gl.constexpr = queries_lower.dtype
    stage, parity = count % STAGES, count // STAGES & 1
    scores = gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES)
    mbarrier.wait(full.index(stage * PIECES + ROTATED), parity)
    scores = warpgroup_mma(queries_rotated, rotated.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    mbarrier.wait(full.index(stage * PIECES + LOWER), parity)
    scores = warpgroup_mma(queries_lower, lower.index(stage).permute((1, 0)), scores, is_async=True)
    mbarrier.wait(full.index(stage * PIECES + UPPER), parity)
    scores = warpgroup_mma(queries_upper, upper.index(stage).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(empty.index(stage * PIECES + ROTATED))
    if MASK:
        keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where((keys < seen)[None, :], scores, -float("inf"))
    new_largest = gl.maximum(largest, gl.max(scores, axis=1) * score_scale)
    # a row that has seen nothing: minus infinity less itself is not a number
    shift = gl.where(new_largest == -float("inf"), 0.0, new_largest) if MASK else new_largest
    weights = gl.exp2(scores * score_scale - shift[:, None])
    shrink = gl.exp2(largest - shift)
    total = total * shrink + gl.sum(weights, axis=1)
    weights = weights.to(DTYPE)
    mbarrier.wait(taken, (handed & 1) ^ 1)
    shared_weights.store(weights)
    shared_shrink.store(shrink)
    fence_async_shared()
    mbarrier.arrive(given)
    sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
    if MASK and not NARROW and seen < KEYS:
        _clear_end(lower_boxes, stage, seen, DTYPE)
    sums = warpgroup_mma(gl.convert_layout(weights, WEIGHTS), lower.index(stage), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index(stage * PIECES + LOWER))
    return sums, new_largest, total


@gluon.jit
def _attend_lower(
    q,
    seq_lens,
    out,
    part_values,
    part_maxima,
    part_sums,
    batch_size,
    q_stride,
    out_stride,
    score_scale,
    value_scale,
    worker,
    head_tile,
    share,
    tile,
    share_end,
    request,
    request_start,
    request_end,
    queries_lower,
    queries_upper,
    queries_rotated,
    lower,
    upper,
    rotated,
    lower_boxes,
    full,
    empty,
    given,
    taken,
    shared_weights,
    shared_shrink,
    HEAD_TILES: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NARROW: gl.constexpr,
):
    count = 0
    handed = 0
    copy_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    is_row = (copy_rows < GROUP)[:, None]
    while tile < share_end:
        mbarrier.wait(taken, (handed & 1) ^ 1)  # the second group stores by way of its half of the last queries
        q_rows = q + request.to(gl.int64) * q_stride + head_tile * (GROUP * KEY_DIM)
        _ask_for_queries(q_rows, queries_rotated, is_row, 2 * HALF, NARROW)
        _ask_for_queries(q_rows, queries_lower, is_row, 0, NARROW)
        _ask_for_queries(q_rows, queries_upper, is_row, HALF, NARROW)
        async_copy.commit_group()
        seq_len = gl.load(seq_lens + request)
        next_tile = gl.minimum(share_end, request_end)
        last = next_tile - request_start - 1
        sums = gl.zeros([ROWS, HALF], gl.float32, layout=SUMS)
        largest = gl.full([ROWS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, SCORES))
        async_copy.wait_group(0)
        fence_async_shared()
        for _block in range(tile - request_start, last):
            sums, largest, total = _turn(
                queries_lower, queries_upper, queries_rotated, lower, upper, rotated, lower_boxes,
                sums, largest, total, score_scale, KEYS, count, handed,
                full, empty, given, taken, shared_weights, shared_shrink, False, STAGES, NARROW,
            )  # fmt: skip
            count += 1
            handed += 1
        sums, largest, total = _turn(
            queries_lower, queries_upper, queries_rotated, lower, upper, rotated, lower_boxes,
            sums, largest, total, score_scale, seq_len - last * KEYS, count, handed,
            full, empty, given, taken, shared_weights, shared_shrink, True, STAGES, NARROW,
        )  # fmt: skip
        count += 1
        handed += 1

        first_worker = request_start // share
        alone = first_worker == (request_end - 1) // share
        # a share holds two parts of requests at most: one that came in, slot 0, and one that goes on, slot 1
        slot = worker * 2 + (worker == first_worker).to(gl.int32)
        place = (slot * HEAD_TILES + head_tile) * GROUP
        factor = gl.where(alone, value_scale / gl.where(total == 0.0, 1.0, total), 1.0)
        mbarrier.wait(taken, (handed & 1) ^ 1)
        shared_shrink.store(factor)
        mbarrier.arrive(given)
        handed += 1
        sums = sums * gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        left = (rows < GROUP) & (not alone)
        gl.store(part_maxima + place + rows, largest, mask=left)
        gl.store(part_sums + place + rows, total, mask=left)
        row_base = request.to(gl.int64) * out_stride + head_tile * (GROUP * 2 * HALF)
        _store_half(
            sums, queries_lower, out, part_values, row_base, place.to(gl.int64) * (2 * HALF), alone, 0, GROUP
        )
        tile = next_tile
        request, request_start, request_end = _following(seq_lens, request, request_end, batch_size)


@gluon.jit
def _attend_upper(
    seq_lens,
    out,
    part_values,
    batch_size,
    out_stride,
    worker,
    head_tile,
    share,
    tile,
    share_end,
    request,
    request_start,
    request_end,
    queries_upper,
    upper,
    narrow,
    lower_boxes,
    upper_boxes,
    rotated_boxes,
    full,
    empty,
    came,
    gone,
    given,
    taken,
    shared_weights,
    shared_shrink,
    HEAD_TILES: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NARROW: gl.constexpr,
):
    DTYPE: gl.constexpr = upper.dtype
    count = 0
    handed = 0
    while tile < share_end:
        seq_len = gl.load(seq_lens + request)
        next_tile = gl.minimum(share_end, request_end)
        sums = gl.zeros([ROWS, HALF], gl.float32, layout=SUMS)
        for block in range(tile - request_start, next_tile - request_start):
            stage, parity = count % STAGES, count // STAGES & 1
            seen = seq_len - block * KEYS
            if NARROW:
                _widen(narrow, lower_boxes, upper_boxes, rotated_boxes, full, empty, came, gone, count, seen)
            mbarrier.wait(full.index(stage * PIECES + UPPER), parity)
            mbarrier.wait(given, handed & 1)
            shrink = shared_shrink.load(gl.SliceLayout(1, SUMS))
            sums = sums * shrink[:, None]
            if not NARROW and seen < KEYS:
                _clear_end(upper_boxes, stage, seen, DTYPE)
            sums = warpgroup_mma(shared_weights, upper.index(stage), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(empty.index(stage * PIECES + UPPER))
            mbarrier.arrive(taken)
            count += 1
            handed += 1
        first_worker = request_start // share
        alone = first_worker == (request_end - 1) // share
        slot = worker * 2 + (worker == first_worker).to(gl.int32)
        place = (slot * HEAD_TILES + head_tile) * GROUP
        mbarrier.wait(given, handed & 1)
        factor = shared_shrink.load(gl.SliceLayout(1, SUMS))
        sums = sums * factor[:, None]
        row_base = request.to(gl.int64) * out_stride + head_tile * (GROUP * 2 * HALF)
        _store_half(
            sums, queries_upper, out, part_values, row_base, place.to(gl.int64) * (2 * HALF), alone, HALF, GROUP
        )
        mbarrier.arrive(taken)
        handed += 1
        tile = next_tile
        request, request_start, request_end = _following(seq_lens, request, request_end, batch_size)


@gluon.jit(  # what differs from step to step must not be compiled for while serving
    do_not_specialize=["batch_size", "table_stride", "num_workers"],
    do_not_specialize_on_alignment=["page_table", "seq_lens"],
)
def hopper_latent_kernel(
    q,  # [batch, num_heads, 576]
    kv,  # descriptor of rows of 576
    page_table,
    seq_lens,
    out,  # [batch, num_heads, 512]
    part_values,  # [slots, num_heads, 512]
    part_maxima,  # [slots, num_heads], of exponents of two
    part_sums,  # like part_maxima
    batch_size,
    q_stride,
    out_stride,
    table_stride,
    num_workers,  # shares of each tile of heads
    score_scale,  # to powers of two
    value_scale,
    HEAD_TILES: gl.constexpr,
    GROUP: gl.constexpr,  # heads of a tile
    BATCH: gl.constexpr,  # the batch and more
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,  # from a page to the next
    BOX_TOKENS: gl.constexpr,
    NARROW: gl.constexpr,  # whether pages are FP8
    DTYPE: gl.constexpr,  # of products
    REGISTERS: gl.constexpr,  # of a thread of the second group
    COPY_REGISTERS: gl.constexpr,
):
    PARTS: gl.constexpr = HALF // BOX_DIMS
    PAGES: gl.constexpr = KEYS // BOX_TOKENS
    BOXES: gl.constexpr = NARROW_STAGES * (KEY_DIM // BOX_DIMS) if NARROW else 1
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
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
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    narrow = gl.allocate_shared_memory(gl.float8e4nv, [BOXES, KEYS, BOX_DIMS], NARROW_TILE) if NARROW else rotated
    came = gl.allocate_shared_memory(gl.int64, [NARROW_STAGES, 1], mbarrier.MBarrierLayout())
    gone = gl.allocate_shared_memory(gl.int64, [NARROW_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NARROW_STAGES):
        mbarrier.init(came.index(i), count=1)
        mbarrier.init(gone.index(i), count=1)
    mbarrier.init(given, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    lower_boxes = lower._reinterpret(DTYPE, [STAGES * PARTS, KEYS, BOX_DIMS], TILE)
    upper_boxes = upper._reinterpret(DTYPE, [STAGES * PARTS, KEYS, BOX_DIMS], TILE)
    lower_pages = lower._reinterpret(DTYPE, [STAGES * PARTS * PAGES, BOX_TOKENS, BOX_DIMS], TILE)
    upper_pages = upper._reinterpret(DTYPE, [STAGES * PARTS * PAGES, BOX_TOKENS, BOX_DIMS], TILE)
    narrow_pages = (
        narrow._reinterpret(gl.float8e4nv, [BOXES * PAGES, BOX_TOKENS, BOX_DIMS], NARROW_TILE) if NARROW else narrow
    )
    rotated_pages = rotated._reinterpret(DTYPE, [STAGES * PAGES, BOX_TOKENS, BOX_DIMS], TILE)
    # fmt: off
    gl.warp_specialize(
        [
            (_attend_lower, (q, seq_lens, out, part_values, part_maxima, part_sums, batch_size, q_stride, out_stride,
                             score_scale, value_scale, worker, head_tile, share, tile, share_end,
                             request, request_start, request_end, queries_lower, queries_upper, queries_rotated,
                             lower, upper, rotated, lower_boxes, full, empty, given, taken,
                             shared_weights, shared_shrink, HEAD_TILES, GROUP, STAGES, NARROW)),
            (_attend_upper, (seq_lens, out, part_values, batch_size, out_stride, worker, head_tile, share,
                             tile, share_end, request, request_start, request_end, queries_upper, upper, narrow,
                             lower_boxes, upper_boxes, rotated, full, empty, came, gone, given, taken,
                             shared_weights, shared_shrink, HEAD_TILES, GROUP, STAGES, NARROW)),
            (_copy, (kv, page_table, seq_lens, batch_size, table_stride, tile, share_end,
                     request, request_start, request_end, lower_pages, upper_pages, rotated_pages, narrow_pages,
                     full, empty, came, gone, STAGES, PAGE_SIZE, PAGE_ROWS, BOX_TOKENS, NARROW)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )
    # fmt: on
