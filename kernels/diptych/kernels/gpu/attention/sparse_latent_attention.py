"""Attention on a GPU of tokens that each chose the latents that they attend to: of decode steps and of prompts alike.

A row is a new token; what it attends to is a list of slots of the pool, in the order of positions. Its heads are a
tile, or two, that walks the list as the portable kernel of `latent_attention.py` walks a request: by the same
arithmetic, so that a row whose list is all that it sees has the bits of a request that is in one share there. A row's
list may be cut into equal parts, each of which is a program; what they have is added up in their order. Rule: into how
many follows from the number of rows alone, and a row's bits from that and from what it attends to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.attention import hopper_latent
from diptych.kernels.gpu.attention.decode_attention import FP8, LOG2_E, MIN_HEADS
from diptych.kernels.gpu.attention.latent_attention import LatentShape, Parts, merge_launch
from diptych.kernels.gpu.attention.latent_attention_kernels import add_parts, load_query, store_halves, take_in
from diptych.kernels.gpu.grid import cdiv


@dataclass(frozen=True, slots=True)
class SparseWorkspace:
    """What parts of rows leave for the sum. One for all launches of a stream; none may run beside another."""

    values: Tensor  # [parts, num_heads, rank], float32
    maxima: Tensor  # [parts, num_heads]
    sums: Tensor  # like maxima

    @staticmethod
    def allocate(shape: LatentShape, num_parts: int, device: torch.device) -> SparseWorkspace:
        """Return one for launches of so many parts in all."""
        values = torch.empty(num_parts, shape.num_heads, shape.rank, device=device)
        maxima, sums = torch.empty(2, num_parts, shape.num_heads, device=device)
        return SparseWorkspace(values, maxima, sums)


def most_parts(shape: LatentShape, num_sms: int) -> int:
    """Return how many parts of rows run at once: no launch has more, unless it has as many rows."""
    return max(1, num_sms * shape.decode_tile.programs_per_sm // shape.head_tiles)


def parts_of_rows(shape: LatentShape, num_rows: int, num_kept: int, num_sms: int) -> int:
    """Return into how many parts each of so many rows is cut: all of them run at once, or each row is whole."""
    return max(1, min(most_parts(shape, num_sms) // num_rows, cdiv(num_kept, shape.decode_tile.block)))


def sparse_latent_attention(
    q: Tensor,
    kv_layer: Tensor,
    chosen: Tensor,
    lens: Tensor,
    out: Tensor,
    workspace: SparseWorkspace,
    shape: LatentShape,
    *,
    scale: float,
    kv_scale: float = 1.0,
    num_parts: int,
) -> None:
    """Attend `q[num_rows, num_heads, rank + rope_dim]` to what each row chose, into `out[num_rows, num_heads, rank]`.

    `kv_layer` as in `latent_decode`. `chosen`: int32 `[num_rows, num_kept]`, slots; `lens`: int32 `[num_rows]`, what a
    row sees: it attends to the first so many of its slots, or to all if they are fewer; 0: nothing is read and `out` is
    0. Rows of `q` and `out` may have any stride. `num_parts`: of each row. Runs on the current stream, allocates
    nothing once compiled, and may be captured: a replay reads what `chosen` and `lens` hold at its own time.
    """
    _check(q, kv_layer, chosen, lens, out, shape)
    assert num_parts == 1 or len(workspace.maxima) >= len(q) * num_parts, (workspace.maxima.shape, len(q), num_parts)
    parts = workspace.values, workspace.maxima, workspace.sums
    attend = hopper_latent.attend_to_chosen if _pays_on_hopper(shape, kv_layer) else attend_anywhere
    with torch.cuda.device_of(q):
        attend(q, kv_layer, chosen, lens, out, parts, shape, scale * kv_scale * LOG2_E, kv_scale, num_parts)
        if num_parts > 1:
            _merge(parts, chosen.shape[1], lens, out, shape, kv_scale, num_parts)


def _pays_on_hopper(shape: LatentShape, kv_layer: Tensor) -> bool:
    """As of `latent_decode`: up to 16 heads have tiles of as many rows."""
    dims = shape.rank, shape.rope_dim
    return shape.decode_rows > MIN_HEADS and hopper_latent.gathers(dims, shape.dtype, kv_layer)


def attend_anywhere(
    q: Tensor,
    kv_layer: Tensor,
    chosen: Tensor,
    lens: Tensor,
    out: Tensor,
    parts: Parts,
    shape: LatentShape,
    score_scale: float,
    value_scale: float,
    num_parts: int,
) -> None:
    """Leave what parts of rows have in `parts`, or in `out` where one has all of a row."""
    kv = kv_layer.view(torch.int16) if kv_layer.dtype == FP8 else kv_layer
    constants = shape.decode_constants(len(q))
    constants.pop("BATCH")
    sparse_latent_kernel[(len(q) * num_parts * shape.head_tiles,)](
        q,
        kv,
        chosen,
        lens,
        out,
        *parts,
        q.stride(0),
        out.stride(0),
        chosen.stride(0),
        kv.stride(0),
        kv.stride(2),
        num_parts,
        score_scale,
        value_scale,
        **constants,
        NUM_KEPT=chosen.shape[1],
        COMPILED=not triton.knobs.runtime.interpret,
        num_warps=shape.decode_tile.num_warps,
    )


def _merge(
    parts: Parts, num_kept: int, lens: Tensor, out: Tensor, shape: LatentShape, value_scale: float, num_parts: int
) -> None:
    launch = merge_launch(shape, len(lens), len(lens) * num_parts)
    sparse_merge_kernel[(len(lens), shape.num_heads, cdiv(shape.rank, launch.dims))](
        *parts,
        lens,
        out,
        out.stride(0),
        num_parts,
        value_scale,
        NUM_HEADS=shape.num_heads,
        NUM_KEPT=num_kept,
        DIM=shape.rank,
        DIM_BLOCK=launch.dims,
        BLOCK=shape.decode_tile.block,
        TOGETHER=launch.parts,
        num_warps=launch.num_warps,
    )


def _check(q: Tensor, kv_layer: Tensor, chosen: Tensor, lens: Tensor, out: Tensor, shape: LatentShape) -> None:
    key_dim = shape.rank + shape.rope_dim
    assert (q.shape[1:], out.shape[1:]) == ((shape.num_heads, key_dim), (shape.num_heads, shape.rank)), (q.shape, shape)
    assert kv_layer.shape[1:] == (1, shape.page_size, 1, key_dim), (kv_layer.shape, shape)
    assert (shape.rank % 2, shape.rope_dim % 2) == (0, 0), shape
    assert q.stride()[1:] == (key_dim, 1), q.stride()
    assert out.stride()[1:] == (shape.rank, 1), out.stride()
    assert (kv_layer.stride(4), chosen.stride(1)) == (1, 1), (kv_layer.stride(), chosen.stride())
    assert len(out) == len(q) == len(chosen) == len(lens), (q.shape, chosen.shape, out.shape)
    assert chosen.dtype == lens.dtype == torch.int32, (chosen.dtype, lens.dtype)


@triton.jit(
    do_not_specialize=["num_parts"],
    do_not_specialize_on_alignment=["lens"],
)
def sparse_latent_kernel(
    q,  # [num_rows, num_heads, 2 * (HALF + ROPE_HALF)]
    kv,  # [num_pages, page_size, 2 * (HALF + ROPE_HALF)], in int16 pairs if PAIRED
    chosen,
    lens,
    out,  # [num_rows, num_heads, 2 * HALF]
    part_values,  # [num_rows, num_parts, num_heads, 2 * HALF]
    part_maxima,  # [num_rows, num_parts, num_heads], of exponents of two
    part_sums,  # like part_maxima
    q_stride,
    out_stride,
    chosen_stride,
    page_stride,  # strides in entries of `kv`
    token_stride,
    num_parts,
    score_scale,  # to powers of two
    value_scale,
    HEAD_TILES: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a tile
    ROWS: tl.constexpr,  # that and more
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROPE_HALF: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    PAIRED: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    head_tile, part = tl.program_id(0) % HEAD_TILES, tl.program_id(0) // HEAD_TILES % num_parts
    row = tl.program_id(0) // (HEAD_TILES * num_parts)
    in_tile = tl.arange(0, ROWS)
    head, is_row = head_tile * GROUP + in_tile, in_tile < GROUP
    count = tl.minimum(tl.load(lens + row), NUM_KEPT)
    num_tiles = tl.cdiv(count, BLOCK)
    share = tl.cdiv(num_tiles, num_parts)
    first, last = part * share, tl.minimum(part * share + share, num_tiles)
    if (part > 0) & (first >= last):
        return
    slots = chosen + row.to(tl.int64) * chosen_stride
    maxima, sums, acc_0, acc_1 = walk_chosen(
        q + row.to(tl.int64) * q_stride + head * (2 * HALF + 2 * ROPE_HALF),
        is_row, kv, slots, first, last, count, page_stride, token_stride, score_scale,
        ROWS, HALF, HALF_BLOCK, ROPE_HALF, ROPE_BLOCK, PAGE_SIZE, BLOCK, PAIRED, DTYPE, STAGES, COMPILED,
    )  # fmt: skip
    if share == num_tiles:
        factor = (value_scale / tl.where(sums == 0, 1.0, sums))[:, None]
        target = out + row.to(tl.int64) * out_stride + head * (2 * HALF)
        store_halves(target, acc_0 * factor, acc_1 * factor, is_row, HALF, HALF_BLOCK, PAIRED)
    else:
        place = (row * num_parts + part) * (HEAD_TILES * GROUP) + head
        tl.store(part_maxima + place, maxima, mask=is_row)
        tl.store(part_sums + place, sums, mask=is_row)
        own = part_values + place.to(tl.int64) * (2 * HALF)
        store_halves(own, acc_0, acc_1, is_row, HALF, HALF_BLOCK, PAIRED)


@triton.jit
def walk_chosen(
    q_rows,
    is_row,
    kv,
    slots,  # of the row
    first,  # tile
    last,
    count,  # of slots
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
    """Return what `walk` of latents does, of a list of slots."""
    half, rope = tl.arange(0, HALF_BLOCK), tl.arange(0, ROPE_BLOCK)
    q_0, q_1 = load_query(q_rows, is_row, half, HALF, PAIRED, DTYPE)
    r_0, r_1 = load_query(q_rows + 2 * HALF, is_row, rope, ROPE_HALF, PAIRED, DTYPE)
    maxima = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    acc_0 = tl.zeros((ROWS, HALF_BLOCK), tl.float32)
    acc_1 = tl.zeros((ROWS, HALF_BLOCK), tl.float32)
    in_tile = tl.arange(0, BLOCK)
    slot = tl.load(slots + first * BLOCK + in_tile, mask=first * BLOCK + in_tile < count, other=0)
    for block in tl.range(first, last, num_stages=STAGES):
        place = block * BLOCK + in_tile
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        places = kv + (page.to(tl.int64) * page_stride + offset * token_stride)[:, None]
        # ahead: the next tile's copies need it
        slot = tl.load(slots + place + BLOCK, mask=place + BLOCK < count, other=0)
        maxima, sums, acc_0, acc_1 = take_in(
            q_0, q_1, r_0, r_1, places, (place < count)[:, None], (place < count)[None, :],
            maxima, sums, acc_0, acc_1, score_scale,
            HALF, HALF_BLOCK, ROPE_HALF, ROPE_BLOCK, PAIRED, DTYPE, COMPILED,
        )  # fmt: skip
    return maxima, sums, acc_0, acc_1


@triton.jit(
    do_not_specialize=["num_parts"],
    do_not_specialize_on_alignment=["lens"],
)
def sparse_merge_kernel(
    part_values,
    part_maxima,
    part_sums,
    lens,
    out,
    out_stride,
    num_parts,
    value_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    DIM: tl.constexpr,  # of values
    DIM_BLOCK: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,  # parts that are read at once
):
    """Add up the parts of one head of a row, in an order that their number alone decides."""
    row, head = tl.program_id(0), tl.program_id(1)
    dim = tl.program_id(2) * DIM_BLOCK + tl.arange(0, DIM_BLOCK)
    num_tiles = tl.cdiv(tl.minimum(tl.load(lens + row), NUM_KEPT), BLOCK)
    share = tl.cdiv(num_tiles, num_parts)
    if share == num_tiles:
        return
    maximum, sum_ = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    values = tl.zeros((DIM_BLOCK,), tl.float32)
    for first in tl.range(0, tl.cdiv(num_tiles, share), TOGETHER):
        part = first + tl.arange(0, TOGETHER)
        place = (row * num_parts + part) * NUM_HEADS + head
        maximum, sum_, values = add_parts(
            part_values,
            part_maxima,
            part_sums,
            place,
            part < tl.cdiv(num_tiles, share),
            maximum,
            sum_,
            values,
            dim,
            DIM,
        )
    target = out + row.to(tl.int64) * out_stride + head * DIM + dim
    tl.store(target, (values * (value_scale / sum_)).to(out.dtype.element_ty), mask=dim < DIM)


def reference_sparse_latent_attention(
    q: Tensor,
    kv_layer: Tensor,
    chosen: Tensor,
    lens: Tensor,
    *,
    rank: int,
    scale: float,
    kv_scale: float = 1.0,
) -> Tensor:
    """Return the same as float64, `[num_rows, num_heads, rank]`, row by row; zeros where there is nothing."""
    outputs = q.new_zeros(*q.shape[:2], rank, dtype=torch.float64)
    stored = kv_layer.view(torch.uint8) if kv_layer.dtype == FP8 else kv_layer  # torch indexes no FP8
    for row, num_seen in enumerate(lens.tolist()):
        slots = chosen[row, :num_seen].long()
        if not len(slots):
            continue
        kept = stored[slots // kv_layer.shape[2], 0, slots % kv_layer.shape[2], 0]
        keys = kept.view(kv_layer.dtype).double() * kv_scale
        outputs[row] = (q[row].double() @ keys.T * scale).softmax(-1) @ keys[:, :rank]
    return outputs
