"""Extend attention of a few new tokens: their prefix is cut into shares, so that all of a GPU walks it.

`extend_attention` has one program for a tile of queries and a KV head. A short prompt has few of those, and behind a
long prefix each would walk thousands of keys while most multiprocessors idle. Here several programs share the keys that
a tile sees, each leaves what it attended to, and a second launch adds up (FlashDecoding's split), in the order of
shares: equal inputs give equal bits. Parts of a tile of queries are large, 32 KiB each: who comes last would add them
up alone for longer than a launch takes, unlike in decode attention. Which steps come here follows from the number of
tokens alone (`is_short`), so that warm-up meets them; how many shares there are, from lengths that the host knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.attention.extend_attention import (
    LOG2_E,
    NUM_SMS,
    POWERS_OF_TWO,
    WIDE_DIM,
    Tile,
    attend_to_keys,
    check_extend,
    find_rows,
    key_bounds,
    load_rows,
)
from diptych.kernels.gpu.grid import cdiv, power_of_two

NARROW_DIM: Final = 128  # of heads up to this two programs are on a multiprocessor
AT_ONCE: Final = 2 * NUM_SMS  # programs of those
MIN_KEYS: Final = 1024  # of a share: fewer take no longer than adding parts up
FEW_ROWS: Final = 16  # the smallest tile of tensor cores
MAX_ROWS: Final = 64  # of a tile
SLOTS: Final = 2 * AT_ONCE  # of a workspace: a request has at most one empty tile beside its own
TOGETHER: Final = tl.constexpr(8)  # shares whose parts are on their way at once
ADDED_ROWS: Final = 8  # of a program that adds up


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """What shares leave. One for all launches of a stream; none of them may run beside another."""

    values: Tensor  # float32 [SLOTS, MAX_ROWS, DIMS]
    maxima: Tensor  # float32 [SLOTS, MAX_ROWS], of exponents of two
    sums: Tensor  # like maxima

    @staticmethod
    def allocate(head_dim: int, device: torch.device) -> SplitWorkspace:
        stats = (SLOTS, MAX_ROWS)
        return SplitWorkspace(
            values=torch.empty(*stats, _dims(head_dim), device=device),
            maxima=torch.empty(stats, device=device),
            sums=torch.empty(stats, device=device),
        )


def is_short(num_rows: int, max_rows: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether `num_rows` pairs of a token and a head of its group, `max_rows` of a request at most, come here.

    They do where tiles that are not split make too few programs for a GPU, or are the smallest. Wider heads than
    `WIDE_DIM` do not.
    """
    return head_dim <= WIDE_DIM and (max_rows <= FEW_ROWS or num_kv_heads * cdiv(num_rows, MAX_ROWS) < NUM_SMS)


def split_tile(max_rows: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile for requests of at most `max_rows` pairs."""
    if dtype == torch.float32:
        return Tile(rows=32, keys=32, num_warps=4, num_stages=2)
    rows = FEW_ROWS if max_rows <= FEW_ROWS else MAX_ROWS
    return Tile(rows=rows, keys=64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)


def num_shares(
    num_rows: int, max_rows: int, batch: int, longest: int, num_kv_heads: int, head_dim: int, tile: Tile
) -> int:
    """Return into how many shares the keys of each tile are cut: as many as run at once, `MIN_KEYS` each at least.

    `max_rows`: of a request; `longest`: keys that a tile sees, both at most. 1 where `batch` requests have more tiles
    than the workspace.
    """
    tiles = min((num_rows + batch * (tile.rows - 1)) // tile.rows, batch * cdiv(max_rows, tile.rows))  # at most
    slots = num_kv_heads * (num_rows // tile.rows + batch)
    at_once = AT_ONCE if head_dim <= NARROW_DIM else NUM_SMS
    return max(1, min(at_once // (num_kv_heads * tiles), SLOTS // slots, longest // MIN_KEYS))


def split_extend_attention(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    extend_starts: Tensor,
    out: Tensor,
    workspace: SplitWorkspace,
    *,
    max_extend_len: int,
    longest: int,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    tile: Tile | None = None,
    shares: int | None = None,
) -> None:
    """Do as `extend_attention`; `longest`: the tokens of a request with its new ones, at most.

    They and the shapes choose the `tile` and the number of `shares` if those are None. Part of a graph it may only be
    where no request of a replay is longer; nothing is wrong then, but slower. Allocates nothing.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, batch = kv_layer.shape[3], len(seq_lens)
    check_extend(q, kv_layer, page_table, seq_lens, extend_starts, out)
    group = num_heads // num_kv_heads
    num_rows = num_tokens * group
    tile = tile or split_tile(max_extend_len * group, head_dim, q.dtype)
    seen = min(longest, window + max_extend_len) if window else longest
    shares = shares or num_shares(num_rows, max_extend_len * group, batch, seen, num_kv_heads, head_dim, tile)
    num_tiles = num_rows // tile.rows + batch
    assert shares == 1 or shares * num_tiles * num_kv_heads <= SLOTS, (shares, num_tiles, num_kv_heads)
    score_factor = softcap or scale * k_scale
    with torch.cuda.device_of(q):
        split_extend_attention_kernel[(num_kv_heads, num_tiles, shares)](
            out,
            q,
            kv_layer,
            page_table,
            seq_lens,
            extend_starts,
            workspace.values,
            workspace.maxima,
            workspace.sums,
            batch,
            *out.stride()[:2],
            *q.stride()[:2],
            page_table.stride(0),
            sinks,
            score_factor * LOG2_E,
            2 * LOG2_E * scale * k_scale / softcap if softcap else 0.0,
            v_scale,
            **_constants(group, kv_layer, window, tile),
            CHUNKED=chunked,
            CAPPED=softcap > 0,
            SINKS=sinks is not None,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if shares > 1:
            _add_up(out, extend_starts, workspace, (num_kv_heads, num_tiles, shares), group, v_scale, tile)


def _add_up(
    out: Tensor,
    extend_starts: Tensor,
    workspace: SplitWorkspace,
    grid: tuple[int, int, int],
    group: int,
    v_scale: float,
    tile: Tile,
) -> None:
    num_kv_heads, num_tiles, shares = grid
    add_up_kernel[(num_kv_heads, num_tiles, tile.rows // ADDED_ROWS)](
        out,
        extend_starts,
        workspace.values,
        workspace.maxima,
        workspace.sums,
        len(extend_starts) - 1,
        shares,
        *out.stride()[:2],
        v_scale,
        GROUP=group,
        HEAD_DIM=out.shape[2],
        TILE_ROWS=tile.rows,
        ROWS=ADDED_ROWS,
        DIMS=_dims(out.shape[2]),
    )


def _constants(group: int, kv_layer: Tensor, window: int, tile: Tile) -> dict[str, Any]:
    head_dim = kv_layer.shape[4]
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": kv_layer.shape[2],
        "PAGE_STRIDE": kv_layer.stride(0),
        "VALUE_STRIDE": kv_layer.stride(1),
        "SLOT_STRIDE": kv_layer.stride(2),
        "KV_HEAD_STRIDE": kv_layer.stride(3),
        "WINDOW": window,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "DIMS": _dims(head_dim),
    }


def _dims(head_dim: int) -> int:
    return max(16, power_of_two(head_dim))


@triton.jit(  # what differs from step to step must not be compiled for while serving
    do_not_specialize=["batch", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "extend_starts"],
)
def split_extend_attention_kernel(
    out,
    q,
    kv,
    page_table,
    seq_lens,
    extend_starts,
    part_values,  # [shares of tiles of heads, ROWS, DIMS]
    part_maxima,  # [.., ROWS], of exponents of two
    part_sums,  # like part_maxima
    batch,
    out_token_stride,
    out_head_stride,
    q_token_stride,
    q_head_stride,
    table_stride,
    sinks,  # [num_heads] if SINKS
    score_factor,  # as in `extend_attention_kernel`, like all that follows
    cap_factor,
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    KV_HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
):
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    share, num_shares = tl.program_id(2), tl.num_programs(2)
    request, extend_start, extend_len, first_row = find_rows(tile, extend_starts, batch, GROUP, ROWS)
    if first_row >= extend_len * GROUP:
        return
    seq_len = tl.load(seq_lens + request)
    prefix_len = seq_len - extend_len

    row, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    tokens, heads = (first_row + row) // GROUP, kv_head * GROUP + (first_row + row) % GROUP
    positions = prefix_len + tl.minimum(tokens, extend_len - 1)
    in_request, in_head = tokens < extend_len, dims < HEAD_DIM
    row_ids = (extend_start + tokens).to(tl.int64)
    q_rows = q + row_ids * q_token_stride + heads * q_head_stride
    queries = load_rows(q_rows, dims, in_request, in_head, True, DIMS != HEAD_DIM)
    if kv.dtype.element_ty == tl.float8e4nv and queries.dtype == tl.bfloat16:
        queries = queries.to(tl.float16)

    first_seen, begin, all_see, diagonal, end = key_bounds(
        first_row, prefix_len, seq_len, WINDOW, CHUNKED, GROUP, ROWS, KEYS
    )
    of_share = tl.cdiv(tl.cdiv(end - begin, KEYS), num_shares) * KEYS
    low, high = begin + share * of_share, begin + (share + 1) * of_share
    bounds = (
        within(begin, low, high),
        within(all_see, low, high),
        within(diagonal, low, high),
        within(end, low, high),
    )
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:  # of the first share: a first score, without a value
        largest = tl.where(share == 0, tl.load(sinks + heads) * POWERS_OF_TWO, largest)
        total = tl.where(share == 0, 1.0, total)
    attended, largest, total = attend_to_keys(
        queries, kv + kv_head * KV_HEAD_STRIDE, page_table + request.to(tl.int64) * table_stride,
        bounds, first_seen, seq_len, positions, positions, dims, in_head, largest, total, score_factor, cap_factor,
        HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, VALUE_STRIDE, SLOT_STRIDE, WINDOW, CHUNKED, CAPPED, ROWS, KEYS, DIMS,
    )  # fmt: skip

    if num_shares == 1:
        attended *= (v_scale / total)[:, None]
        out_rows = out + row_ids * out_token_stride + heads * out_head_stride
        inside = in_request[:, None] & in_head[None, :]
        tl.store(out_rows[:, None] + dims[None, :], attended.to(out.dtype.element_ty), mask=inside)
    else:
        slot = (tile * tl.num_programs(0) + kv_head) * num_shares + share
        tl.store(part_maxima + slot * ROWS + row, largest)
        tl.store(part_sums + slot * ROWS + row, total)
        tl.store(part_values + slot * (ROWS * DIMS) + row[:, None] * DIMS + dims[None, :], attended)


@triton.jit
def within(bound, low, high):
    return tl.minimum(tl.maximum(bound, low), high)


@triton.jit(do_not_specialize=["batch", "num_shares"], do_not_specialize_on_alignment=["extend_starts"])
def add_up_kernel(
    out,
    extend_starts,
    part_values,  # as in `split_extend_attention_kernel`
    part_maxima,
    part_sums,
    batch,
    num_shares,
    out_token_stride,
    out_head_stride,
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,  # of the tile that a program adds up
    DIMS: tl.constexpr,
):
    """Write what the parts of some rows come to. A share that sees no key of a row has -inf there, and zeros."""
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    _, extend_start, extend_len, first_row = find_rows(tile, extend_starts, batch, GROUP, TILE_ROWS)
    row, dims = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    tokens, heads = (first_row + row) // GROUP, kv_head * GROUP + (first_row + row) % GROUP
    if first_row + tl.program_id(2) * ROWS >= extend_len * GROUP:
        return
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, DIMS), tl.float32)
    first_slot = (tile * tl.num_programs(0) + kv_head) * num_shares
    for first in tl.range(0, num_shares, TOGETHER):
        for later in tl.static_range(TOGETHER):  # all on their way at once
            share = first + later
            rows, exists = (first_slot + share) * TILE_ROWS + row, share < num_shares
            part_largest = tl.load(part_maxima + rows, mask=exists, other=float("-inf"))
            part_total = tl.load(part_sums + rows, mask=exists, other=0.0)
            part = tl.load(part_values + rows[:, None] * DIMS + dims[None, :], mask=exists, other=0.0)
            new_largest = tl.maximum(largest, part_largest)
            shrink, weight = tl.exp2(largest - new_largest), tl.exp2(part_largest - new_largest)
            total = total * shrink + part_total * weight
            values = values * shrink[:, None] + part * weight[:, None]
            largest = new_largest
    values *= (v_scale / total)[:, None]
    out_rows = out + (extend_start + tokens).to(tl.int64) * out_token_stride + heads * out_head_stride
    inside = (tokens < extend_len)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_rows[:, None] + dims[None, :], values.to(out.dtype.element_ty), mask=inside)
