"""The kernel of `prompt_attention`: for Hopper, in Gluon, as it says itself which warps copy and which multiply.

FlashAttention-3's order (arXiv 2407.08608). A program has warps that copy and groups of warps that multiply, each group
its own rows of queries. Keys and values come through the copy engine straight from the pages of the pool: a box of one
page and 64 dimensions lands in the rows of a shared tile where a matrix product expects it. A group has two products
on their way at once, scores of the next keys and values of the last ones, and computes exponentials of these scores
while the values are multiplied. Programs stay and take one tile of queries after the other: copies for the next one
begin while this one ends.
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

MASKED: Final = gl.constexpr(-(2.0**100))  # see `extend_attention`
GROUPS: Final = gl.constexpr(2)  # of four warps that multiply
OWN: Final = gl.constexpr(64)  # rows of a group: as many as its products have
ROWS: Final = gl.constexpr(128)
BOX_DIMS: Final = gl.constexpr(64)  # what the copy engine brings at once of a row: 128 bytes, its widest pattern

LAYOUT: Final = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def rows_by_boxes(kv: Any, shape: list[int], stride: int, box: list[int]) -> Any:
    """Return what the copy engine reads rows by that are `stride` apart."""
    return TensorDescriptor(kv, shape, [stride, 1], box, LAYOUT)


@gluon.jit
def _tile_of(work, item, seq_lens, extend_starts, GROUP: gl.constexpr, KEYS: gl.constexpr):
    """Where an item is, and how many tiles of keys it sees: none if there is no such item."""
    request = gl.load(work + item * 4)
    kv_head = gl.load(work + item * 4 + 1)
    first_row = gl.load(work + item * 4 + 2)
    begin = gl.load(extend_starts + request)
    extend_len = gl.load(extend_starts + request + 1) - begin
    seq_len = gl.load(seq_lens + request)
    end = gl.minimum(seq_len - extend_len + (first_row + ROWS - 1) // GROUP + 1, seq_len)
    turns = gl.where(kv_head < 0, 0, (end + KEYS - 1) // KEYS)
    return request, kv_head, first_row, begin, extend_len, seq_len, turns


@gluon.jit
def _copy(
    kv,
    page_table,
    work,
    seq_lens,
    extend_starts,
    num_items,
    table_stride,
    boxes,
    full,
    empty,
    FIRST: gl.constexpr,  # row of a page's first key, or value
    GROUP: gl.constexpr,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
):
    """Bring keys, or values, the last ones of a sequence first. Pages behind its end are zeros."""
    PAGES: gl.constexpr = KEYS // PAGE_SIZE
    PARTS: gl.constexpr = DIM // BOX_DIMS
    count = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        request, kv_head, _first_row, _begin, _extend_len, seq_len, turns = _tile_of(
            work, item, seq_lens, extend_starts, GROUP, KEYS
        )
        table = page_table + request * table_stride
        num_pages = (seq_len + PAGE_SIZE - 1) // PAGE_SIZE
        for turn in range(turns):
            first = (turns - 1 - turn) * PAGES
            rows = ()
            for i in gl.static_range(PAGES):  # all are asked for before the first is used
                page = gl.load(table + first + i, mask=first + i < num_pages, other=-1)
                rows = rows + (page * PAGE_ROWS + FIRST,)  # type: ignore[assignment]  # noqa: RUF005
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), KEYS * DIM * 2)
            for i in gl.static_range(PAGES):
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        kv,
                        [rows[i], kv_head * DIM + part * BOX_DIMS],
                        full.index(stage),
                        boxes.index(stage * (PAGES * PARTS) + part * PAGES + i),
                    )
            count += 1


@gluon.jit
def _pack(weights, DTYPE: gl.constexpr):
    """As pairs in one register each: those of a tile live through a turn of the loop, where registers are few."""
    even, odd = gl.split(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]))
    ASM: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if DTYPE.is_bf16() else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(packed, DTYPE: gl.constexpr, WEIGHTS: gl.constexpr):
    """As the operand of a product; costs no instruction."""
    even = packed.to(gl.int16).to(DTYPE, bitcast=True)
    odd = (packed >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [packed.shape[0], packed.shape[1] * 2]), WEIGHTS)


@gluon.jit
def _weigh(scores, largest, total, factor, seen, MASK: gl.constexpr, SCORES: gl.constexpr):
    """`seen`: keys of this tile that each row sees; may be negative."""
    if MASK:
        keys = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(keys[None, :] < seen[:, None], scores, MASKED)
    new_largest = gl.maximum(largest, gl.max(scores, axis=1) * factor)
    weights = gl.exp2(scores * factor - new_largest[:, None])
    shrink = gl.exp2(largest - new_largest)
    total = total * shrink + gl.sum(weights, axis=1)
    return weights, new_largest, total, shrink


@gluon.jit
def _turn(
    queries,
    keys,
    values,
    packed,
    attended,
    largest,
    total,
    factor,
    seen,
    count,
    full_keys,
    full_values,
    empty_keys,
    empty_values,
    turns,
    WHICH: gl.constexpr,
    MASK: gl.constexpr,
    SCORES: gl.constexpr,
    ATTENDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Scores of tile `count`, and values of the one before."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ATTENDED, k_width=2)
    ROWS: gl.constexpr = attended.shape[0]
    KEYS: gl.constexpr = keys.shape[1]
    stage, before = count % STAGES, (count - 1) % STAGES
    zeros = gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES)
    mbarrier.wait(full_keys.index(stage), count // STAGES & 1)
    mbarrier.wait(turns.index(WHICH), (count & 1) ^ (1 - WHICH))
    scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(full_values.index(before), (count - 1) // STAGES & 1)
    weights = _unpack(packed, queries.dtype, WEIGHTS)
    attended = warpgroup_mma(weights, values.index(before), attended, is_async=True)
    mbarrier.arrive(turns.index(1 - WHICH))
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(empty_keys.index(stage))
    new_weights, largest, total, shrink = _weigh(scores, largest, total, factor, seen, MASK, SCORES)
    attended, weights = warpgroup_mma_wait(0, deps=[attended, weights])
    mbarrier.arrive(empty_values.index(before))
    attended = attended * gl.convert_layout(shrink, gl.SliceLayout(1, ATTENDED))[:, None]
    return _pack(new_weights, queries.dtype), attended, largest, total


@gluon.jit
def _rows(
    states,
    kv_head,
    first_row,
    begin,
    extend_len,
    token_stride,
    head_stride,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    COPY: gl.constexpr,
):
    """Where rows of queries, or of what they attend to, are; and which of them are a request's."""
    rows = first_row + gl.arange(0, OWN, layout=gl.SliceLayout(1, COPY))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    places = states + (begin + tokens).to(gl.int64) * token_stride + heads * head_stride
    return places[:, None] + dims[None, :], (tokens < extend_len)[:, None]


@gluon.jit
def _attend(
    WHICH: gl.constexpr,  # of the groups of warps that multiply
    out,
    q,
    work,
    seq_lens,
    extend_starts,
    num_items,
    out_token_stride,
    out_head_stride,
    q_token_stride,
    q_head_stride,
    factor,
    v_scale,
    queries,  # two tiles of each group: its own, and what comes
    keys,
    values,
    full_keys,
    full_values,
    empty_keys,
    empty_values,
    turns,  # a group issues its products while the other one computes exponentials
    GROUP: gl.constexpr,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    ATTENDED: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ATTENDED, k_width=2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    count, parity = 0, 0
    _request, kv_head, tile_row, begin, extend_len, seq_len, num_turns = _tile_of(
        work, gl.program_id(0), seq_lens, extend_starts, GROUP, KEYS
    )
    rows, inside = _rows(
        q, kv_head, tile_row + WHICH * OWN, begin, extend_len, q_token_stride, q_head_stride, GROUP, DIM, COPY
    )
    async_copy.async_copy_global_to_shared(queries.index(WHICH * 2), rows, mask=inside & (num_turns > 0))
    async_copy.commit_group()
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        own = queries.index(WHICH * 2 + parity)
        following = item + gl.num_programs(0)
        _next_request, next_head, next_row, next_begin, next_len, next_seq_len, next_turns = _tile_of(
            work, gl.minimum(following, num_items - 1), seq_lens, extend_starts, GROUP, KEYS
        )
        if num_turns > 0:
            first_row = tile_row + WHICH * OWN
            async_copy.wait_group(0)
            fence_async_shared()

            prefix_len = seq_len - extend_len
            score_rows = first_row + gl.arange(0, OWN, layout=gl.SliceLayout(1, SCORES))
            seen = prefix_len + gl.minimum(score_rows // GROUP, extend_len - 1) + 1
            last = num_turns - 1
            whole = (prefix_len + tile_row // GROUP + 1) // KEYS  # tiles that each row sees all of
            masked = gl.maximum(num_turns - whole, 1)

            stage = count % STAGES
            zeros = gl.zeros([OWN, KEYS], gl.float32, layout=SCORES)
            mbarrier.wait(full_keys.index(stage), count // STAGES & 1)
            mbarrier.wait(turns.index(WHICH), (count & 1) ^ (1 - WHICH))
            scores = warpgroup_mma(own, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.arrive(turns.index(1 - WHICH))
            rows, inside = _rows(
                q, next_head, next_row + WHICH * OWN, next_begin, next_len, q_token_stride, q_head_stride,
                GROUP, DIM, COPY,
            )  # fmt: skip
            async_copy.async_copy_global_to_shared(
                queries.index(WHICH * 2 + 1 - parity),
                rows,
                mask=inside & (following < num_items) & (next_turns > 0),
            )
            async_copy.commit_group()
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(empty_keys.index(stage))
            largest = gl.full([OWN], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
            total = gl.zeros([OWN], gl.float32, layout=gl.SliceLayout(1, SCORES))
            weights, largest, total, _shrink = _weigh(scores, largest, total, factor, seen - last * KEYS, True, SCORES)
            packed = _pack(weights, own.dtype)
            attended = gl.zeros([OWN, DIM], gl.float32, layout=ATTENDED)
            if num_turns * KEYS > seq_len:  # what is behind the end may be NaN, whose product with 0 is NaN
                mbarrier.wait(full_values.index(stage), count // STAGES & 1)
                tile = values.index(stage).load(COPY)
                places = last * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, COPY))
                values.index(stage).store(gl.where((places < seq_len)[:, None], tile, 0.0))
                fence_async_shared()
            count += 1
            for turn in range(1, masked):
                packed, attended, largest, total = _turn(
                    own, keys, values, packed, attended, largest, total, factor, seen - (last - turn) * KEYS, count,
                    full_keys, full_values, empty_keys, empty_values, turns,
                    WHICH, True, SCORES, ATTENDED, STAGES,
                )  # fmt: skip
                count += 1
            for _turn_number in range(masked, num_turns):
                packed, attended, largest, total = _turn(
                    own, keys, values, packed, attended, largest, total, factor, seen, count,
                    full_keys, full_values, empty_keys, empty_values, turns,
                    WHICH, False, SCORES, ATTENDED, STAGES,
                )  # fmt: skip
                count += 1
            before = (count - 1) % STAGES
            mbarrier.wait(full_values.index(before), (count - 1) // STAGES & 1)
            final = _unpack(packed, own.dtype, WEIGHTS)
            attended = warpgroup_mma(final, values.index(before), attended, is_async=True)
            attended, final = warpgroup_mma_wait(0, deps=[attended, final])
            mbarrier.arrive(empty_values.index(before))
            attended = attended * gl.convert_layout(v_scale / total, gl.SliceLayout(1, ATTENDED))[:, None]
            own.store(attended.to(own.dtype))
            rows, inside = _rows(
                out, kv_head, first_row, begin, extend_len, out_token_stride, out_head_stride, GROUP, DIM, COPY
            )
            gl.store(rows, own.load(COPY), mask=inside)
        parity = 1 - parity
        kv_head, tile_row, begin, extend_len = next_head, next_row, next_begin, next_len
        seq_len, num_turns = next_seq_len, next_turns


@gluon.jit(  # what differs from step to step must not be compiled for while serving
    do_not_specialize=["num_items", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "extend_starts", "work"],
)
def prompt_attention_kernel(
    out,
    q,
    kv,
    page_table,
    seq_lens,
    extend_starts,
    work,
    num_items,
    out_token_stride,
    out_head_stride,
    q_token_stride,
    q_head_stride,
    table_stride,
    factor,  # makes powers of two of scores
    v_scale,
    GROUP: gl.constexpr,  # query heads a KV head
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,  # from a page to the next
    VALUE_ROWS: gl.constexpr,  # from a page's keys to its values
    REGISTERS: gl.constexpr,  # of a thread that multiplies
    COPY_REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = q.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    queries = gl.allocate_shared_memory(DTYPE, [GROUPS * 2, OWN, DIM], TILE)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, DIM], TILE)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, DIM], TILE)
    BOXES: gl.constexpr = KEYS // PAGE_SIZE * (DIM // BOX_DIMS) * STAGES
    key_boxes = keys._reinterpret(DTYPE, [BOXES, PAGE_SIZE, BOX_DIMS], TILE)
    value_boxes = values._reinterpret(DTYPE, [BOXES, PAGE_SIZE, BOX_DIMS], TILE)
    full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(i), count=1)
        mbarrier.init(full_values.index(i), count=1)
        mbarrier.init(empty_keys.index(i), count=GROUPS)
        mbarrier.init(empty_values.index(i), count=GROUPS)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (0, out, q, work, seq_lens, extend_starts, num_items,
                       out_token_stride, out_head_stride, q_token_stride, q_head_stride, factor, v_scale,
                       queries, keys, values, full_keys, full_values, empty_keys, empty_values, turns,
                       GROUP, KEYS, DIM, STAGES)),
            (_attend, (1, out, q, work, seq_lens, extend_starts, num_items,
                       out_token_stride, out_head_stride, q_token_stride, q_head_stride, factor, v_scale,
                       queries, keys, values, full_keys, full_values, empty_keys, empty_values, turns,
                       GROUP, KEYS, DIM, STAGES)),
            (_copy, (kv, page_table, work, seq_lens, extend_starts, num_items, table_stride, key_boxes,
                     full_keys, empty_keys, 0, GROUP, KEYS, DIM, STAGES, PAGE_SIZE, PAGE_ROWS)),
            (_copy, (kv, page_table, work, seq_lens, extend_starts, num_items, table_stride, value_boxes,
                     full_values, empty_values, VALUE_ROWS, GROUP, KEYS, DIM, STAGES, PAGE_SIZE, PAGE_ROWS)),
        ],
        [4, 1, 1],
        [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )
    # fmt: on
