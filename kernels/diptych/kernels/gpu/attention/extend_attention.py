"""Attention of new tokens over their paged prefix and themselves; all keys and values are read from the pages.

FlashAttention-2's order (arXiv 2307.08691): a program keeps a tile of queries and walks the keys that it sees, with a
running maximum and sum. Three things are decided here. A tile packs the heads of a group beside its tokens, so that
every key is read once for all of them and a short request fills its tile. Requests of any lengths share one grid
without padding: request i has the tiles from `first_row(i) // rows + i` on, of which at most one is empty. And keys are
walked in three phases (left edge of the window, keys that all rows see, diagonal): only edges pay for masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import power_of_two

# Finite: a row that sees nothing of a tile must not become NaN. A power of two: its product with a factor is exact, so
# a fused multiply-add, which does not round it, finds no difference to the rounded one.
MASKED: Final = tl.constexpr(-(2.0**100))
LOG2_E: Final = math.log2(math.e)
REQUESTS_A_LOOK: Final = tl.constexpr(128)
POWERS_OF_TWO: Final = tl.constexpr(LOG2_E)
NUM_SMS: Final = 132  # of an H200
WIDE_DIM: Final = 256  # of wider heads a tile has room for less


@dataclass(frozen=True, slots=True)
class Tile:
    """How much a program computes at once, and with what."""

    rows: int  # pairs of a token and a query head
    keys: int  # of one turn of its loop
    num_warps: int
    num_stages: int


def choose_tile(num_rows: int, max_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile for `num_rows` pairs of a token and a head of its group, `max_rows` of them of one request.

    A rule of shapes, never a search while serving. Long prompts get the largest tile whose loop keeps everything in
    registers and copies two turns ahead. Where that makes fewer programs than an H200 has multiprocessors, tiles are
    half as long, two a multiprocessor; a few new tokens get the smallest that tensor cores take, as memory is what
    they wait for.
    """
    if head_dim > WIDE_DIM:
        return _wide_tile(max_rows, dtype)
    if dtype == torch.float32:
        return Tile(rows=32, keys=32, num_warps=4, num_stages=2)
    if max_rows <= 16:
        return Tile(rows=16, keys=64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)
    if num_kv_heads * -(-num_rows // 128) < NUM_SMS:
        return Tile(rows=64, keys=64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)
    return Tile(rows=128, keys=64 if head_dim <= 128 else 32, num_warps=8, num_stages=3)


def fixed_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile of every step where a token's bits are not to depend on the others."""
    if head_dim > WIDE_DIM:
        return _wide_tile(64, dtype)
    if dtype == torch.float32:
        return Tile(rows=32, keys=32, num_warps=4, num_stages=2)
    return Tile(rows=64, keys=64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)


def _wide_tile(max_rows: int, dtype: torch.dtype) -> Tile:
    """Return the fastest of nine (float32: of three) at 512 dimensions, on an H200; others spill, or do not fit."""
    if dtype == torch.float32:
        return Tile(rows=16, keys=16, num_warps=4, num_stages=2)
    if max_rows <= 16:
        return Tile(rows=16, keys=32, num_warps=4, num_stages=3)
    return Tile(rows=64, keys=32, num_warps=8, num_stages=2)


def extend_attention(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    extend_starts: Tensor,
    out: Tensor,
    *,
    max_extend_len: int,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    tile: Tile | None = None,
    seen_ends: Tensor | None = None,
) -> None:
    """Write to `out` what the queries `q` attend to; both `[num_tokens, num_heads, head_dim]`, of any strides of rows.

    `kv_layer` `[num_pages, 2, page_size, num_kv_heads, head_dim]` is a view of the pool and holds the new tokens, too.
    Float8 (e4m3fn) stands for stored number times `k_scale`, `v_scale`. `page_table` int32 `[batch, max_pages]`,
    `seq_lens` int32 `[batch]` with the new tokens, `extend_starts` int32 `[batch + 1]`: where each request's new tokens
    begin, the first at 0. Rows of `q` from `extend_starts[batch]` on are padding, and left alone. A token sees itself
    and the `window` - 1 before it (0: all), or, if `chunked`, its own chunk of so many up to itself, with scores of
    `softcap` * tanh(score / softcap) (0: as they are). `sinks`, float32 `[num_heads]`: a score of each head that takes
    part in its softmax and has no value. `seen_ends`, int32 `[num_tokens]`: the position behind the last one that each
    token sees, never falling within a request; None: a token sees nothing behind itself.

    Runs on the current stream, reads nothing on the host, and can be part of a CUDA graph: the grid depends on the
    shapes alone. `max_extend_len` (new tokens of one request, at most) and they choose the `tile` if it is None.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, batch = kv_layer.shape[3], len(seq_lens)
    check_extend(q, kv_layer, page_table, seq_lens, extend_starts, out)
    group = num_heads // num_kv_heads
    tile = tile or choose_tile(num_tokens * group, max_extend_len * group, num_kv_heads, head_dim, q.dtype)
    score_factor = softcap or scale * k_scale
    with torch.cuda.device_of(q):
        extend_attention_kernel[(num_kv_heads, num_tokens * group // tile.rows + batch)](
            out,
            q,
            kv_layer,
            page_table,
            seq_lens,
            extend_starts,
            batch,
            *out.stride()[:2],
            *q.stride()[:2],
            page_table.stride(0),
            sinks,
            score_factor * LOG2_E,
            2 * LOG2_E * scale * k_scale / softcap if softcap else 0.0,
            v_scale,
            seen_ends,
            GROUP=group,
            HEAD_DIM=head_dim,
            PAGE_SIZE=kv_layer.shape[2],
            PAGE_STRIDE=kv_layer.stride(0),
            VALUE_STRIDE=kv_layer.stride(1),
            SLOT_STRIDE=kv_layer.stride(2),
            KV_HEAD_STRIDE=kv_layer.stride(3),
            WINDOW=window,
            CHUNKED=chunked,
            CAPPED=softcap > 0,
            SINKS=sinks is not None,
            LOOKS_AHEAD=seen_ends is not None,
            ROWS=tile.rows,
            KEYS=tile.keys,
            DIMS=max(16, power_of_two(head_dim)),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def check_extend(
    q: Tensor, kv_layer: Tensor, page_table: Tensor, seq_lens: Tensor, extend_starts: Tensor, out: Tensor
) -> None:
    """Assert that shapes, dtypes and strides are those of `extend_attention`."""
    assert q.shape == out.shape, (q.shape, out.shape)
    assert q.shape[1] % kv_layer.shape[3] == 0, (q.shape, kv_layer.shape)
    assert q.shape[2] == kv_layer.shape[4], (q.shape, kv_layer.shape)
    assert q.stride(2) == out.stride(2) == kv_layer.stride(4) == 1, (q.stride(), out.stride(), kv_layer.stride())
    assert len(page_table) == len(seq_lens) == len(extend_starts) - 1, (page_table.shape, extend_starts.shape)
    assert page_table.dtype == seq_lens.dtype == extend_starts.dtype == torch.int32, (page_table.dtype, seq_lens.dtype)
    assert page_table.stride(1) == seq_lens.stride(0) == extend_starts.stride(0) == 1, page_table.stride()


@triton.jit(  # what differs from step to step must not be compiled for while serving
    do_not_specialize=["batch", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "extend_starts", "seen_ends"],
)
def extend_attention_kernel(
    out,
    q,
    kv,
    page_table,
    seq_lens,
    extend_starts,
    batch,
    out_token_stride,
    out_head_stride,
    q_token_stride,
    q_head_stride,
    table_stride,
    sinks,  # [num_heads] if SINKS
    score_factor,  # makes powers of two of scores; with a cap: of the part of it that they are
    cap_factor,
    v_scale,
    seen_ends,  # [num_tokens] if LOOKS_AHEAD
    GROUP: tl.constexpr,  # query heads a KV head
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,  # the strides of a pool never change: as constants they save instructions of the loop
    VALUE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    KV_HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    LOOKS_AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,  # HEAD_DIM as a power of two
):
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first: ends of prompts see the most keys
    request, extend_start, extend_len, first_row = find_rows(tile, extend_starts, batch, GROUP, ROWS)
    if first_row >= extend_len * GROUP:
        return
    seq_len = tl.load(seq_lens + request)
    prefix_len = seq_len - extend_len

    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    positions = prefix_len + tl.minimum(tokens, extend_len - 1)
    in_request, in_head = tokens < extend_len, dims < HEAD_DIM
    row_ids = (extend_start + tokens).to(tl.int64)
    q_rows = q + row_ids * q_token_stride + heads * q_head_stride
    queries = load_rows(q_rows, dims, in_request, in_head, True, DIMS != HEAD_DIM)
    if kv.dtype.element_ty == tl.float8e4nv and queries.dtype == tl.bfloat16:
        queries = queries.to(tl.float16)  # what Hopper makes of FP8 in one instruction, exactly

    first_seen, begin, all_see, diagonal, end = key_bounds(
        first_row, prefix_len, seq_len, WINDOW, CHUNKED, GROUP, ROWS, KEYS
    )
    lasts = positions
    if LOOKS_AHEAD:
        lasts = tl.load(seen_ends + extend_start + tl.minimum(tokens, extend_len - 1)) - 1
        end = tl.max(lasts, axis=0) + 1
    bounds = (begin, all_see, diagonal, end)
    table = page_table + request.to(tl.int64) * table_stride
    kv_base = kv + kv_head * KV_HEAD_STRIDE
    if SINKS:
        largest = tl.load(sinks + heads) * POWERS_OF_TWO
        total = tl.full((ROWS,), 1.0, tl.float32)
    else:
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
    attended, largest, total = attend_to_keys(
        queries, kv_base, table, bounds, first_seen, seq_len, positions, lasts, dims, in_head, largest, total,
        score_factor, cap_factor,
        HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, VALUE_STRIDE, SLOT_STRIDE, WINDOW, CHUNKED, CAPPED, ROWS, KEYS, DIMS,
    )  # fmt: skip
    attended *= (v_scale / total)[:, None]
    out_rows = out + row_ids * out_token_stride + heads * out_head_stride
    inside = in_request[:, None] & in_head[None, :]
    tl.store(out_rows[:, None] + dims[None, :], attended.to(out.dtype.element_ty), mask=inside)


@triton.jit
def attend_to_keys(
    queries,
    kv_base,
    table,
    bounds,  # of the three phases
    first_seen,
    seq_len,
    positions,
    lasts,  # position of the last key that each row sees
    dims,
    in_head,
    largest,
    total,
    score_factor,
    cap_factor,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Walk the keys within `bounds`; return the sum of weighted values, the largest exponent and the sum of weights."""
    PRECISION: tl.constexpr = "tf32x3" if queries.dtype == tl.float32 else "tf32"
    attended = tl.zeros((ROWS, DIMS), tl.float32)
    for PHASE in tl.static_range(0 if WINDOW else 1, 3):
        keys = (bounds[PHASE] + tl.arange(0, KEYS)).to(tl.uint32)  # divided in one instruction, as it has no sign
        pages = tl.load(table + keys // PAGE_SIZE, mask=keys < seq_len, other=0)
        for start in tl.range(bounds[PHASE], bounds[PHASE + 1], KEYS):
            keys = (start + tl.arange(0, KEYS)).to(tl.uint32)
            in_sequence = keys < seq_len
            if WINDOW:
                in_sequence &= keys >= first_seen  # what no window sees may be garbage, whose product with 0 is NaN
            k_rows = kv_base + pages.to(tl.int64) * PAGE_STRIDE + keys % PAGE_SIZE * SLOT_STRIDE
            pages = tl.load(table + (keys + KEYS) // PAGE_SIZE, mask=keys + KEYS < seq_len, other=0)
            k = load_rows(k_rows, dims, in_sequence, in_head, PHASE != 1, DIMS != HEAD_DIM)
            scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision=PRECISION)
            if CAPPED:
                scores = 1.0 - 2.0 / (tl.exp2(scores * cap_factor) + 1.0)  # tanh
            if PHASE != 1:
                seen = keys[None, :] <= lasts[:, None]
                if WINDOW:
                    seen &= keys[None, :] >= first_key(positions, WINDOW, CHUNKED)[:, None]
                scores = tl.where(seen, scores, MASKED)
            new_largest = tl.maximum(largest, tl.max(scores, axis=1) * score_factor)
            weights = tl.exp2(scores * score_factor - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            total = total * shrink + tl.sum(weights, axis=1)
            attended *= shrink[:, None]
            v = load_rows(k_rows + VALUE_STRIDE, dims, in_sequence, in_head, PHASE != 1, DIMS != HEAD_DIM)
            attended = tl.dot(weights.to(queries.dtype), v.to(queries.dtype), attended, input_precision=PRECISION)
            largest = new_largest

    return attended, largest, total


@triton.jit
def key_bounds(
    first_row,
    prefix_len,
    seq_len,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return the first key that a tile of rows sees, and the bounds of the three phases of keys.

    They are [begin, all_see), [all_see, diagonal), [diagonal, end): masked, seen by every row, masked.
    """
    first_position = prefix_len + first_row // GROUP
    last_position = tl.minimum(prefix_len + (first_row + ROWS - 1) // GROUP, seq_len - 1)
    diagonal = (first_position + 1) // KEYS * KEYS
    first_seen = first_key(first_position, WINDOW, CHUNKED) if WINDOW else 0
    begin = first_seen // KEYS * KEYS
    all_see = tl.minimum(tl.cdiv(first_key(last_position, WINDOW, CHUNKED), KEYS) * KEYS, diagonal) if WINDOW else 0
    return first_seen, begin, all_see, diagonal, last_position + 1


@triton.jit
def first_key(positions, window, CHUNKED: tl.constexpr):
    """Return the first key that tokens see."""
    if CHUNKED:
        return positions // window * window
    else:
        return tl.maximum(positions + 1 - window, 0)


@triton.jit
def find_rows(tile, extend_starts, batch, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's request, where its new tokens begin, how many there are, and the tile's first row of them."""
    request = find_request(tile, extend_starts, batch, GROUP, ROWS)
    extend_start = tl.load(extend_starts + request)
    extend_len = tl.load(extend_starts + request + 1) - extend_start
    return request, extend_start, extend_len, (tile - extend_start * GROUP // ROWS - request) * ROWS


@triton.jit
def find_request(tile, extend_starts, batch, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the last request whose first tile is not after this one."""
    count = 0
    for first in tl.range(0, batch, REQUESTS_A_LOOK):
        requests = first + tl.arange(0, REQUESTS_A_LOOK)
        starts = tl.load(extend_starts + requests, mask=requests < batch, other=0)
        begun = (starts * GROUP // ROWS + requests <= tile) & (requests < batch)
        count += tl.sum(begun.to(tl.int32), axis=0)
    return count - 1


@triton.jit
def load_rows(rows, columns, in_rows, in_columns, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """Load a tile of which rows or columns may be missing: they are zeros."""
    pointers = rows[:, None] + columns[None, :]
    if MASK_ROWS or MASK_COLUMNS:
        return tl.load(pointers, mask=in_rows[:, None] & in_columns[None, :], other=0.0)
    else:
        return tl.load(pointers)


def reference_extend_attention(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    extend_starts: Tensor,
    *,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    seen_ends: Tensor | None = None,
) -> Tensor:
    """Return the same as float64, `[extend_starts[batch], num_heads, head_dim]`, request by request."""
    group, starts = q.shape[1] // kv_layer.shape[3], extend_starts.tolist()
    outputs = []
    for request, seq_len in enumerate(seq_lens.tolist()):
        pages = page_table[request, : -(-seq_len // kv_layer.shape[2])].long()
        stored = kv_layer.view(torch.uint8) if kv_layer.dtype.itemsize == 1 else kv_layer  # torch indexes no FP8
        tokens = stored[pages].view(kv_layer.dtype).double().transpose(1, 2).flatten(0, 1)[:seq_len]
        keys, values = (tokens * torch.tensor([k_scale, v_scale], device=q.device).double()[:, None, None]).unbind(1)
        queries = q[starts[request] : starts[request + 1]].double()
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(group, dim=1)) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        distances = torch.arange(seq_len - len(queries), seq_len, device=q.device)[:, None] - torch.arange(
            seq_len, device=q.device
        )
        behind = distances >= 0
        if seen_ends is not None:
            behind = torch.arange(seq_len, device=q.device) < seen_ends[starts[request] : starts[request + 1], None]
        seen = behind & (distances < (window or seq_len))
        if chunked:
            places = torch.arange(seq_len, device=q.device) // window
            seen = (distances >= 0) & (places[seq_len - len(queries) :, None] == places)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:2], 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :seq_len]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, dim=1)))
    return torch.cat(outputs)
