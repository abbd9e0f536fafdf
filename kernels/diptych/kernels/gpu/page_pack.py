"""Packs KV of a source pool into pages of a target's layout: other page sizes, fewer heads, a narrower dtype.

A target page is one contiguous piece, so whatever differs is settled here, on the source's GPU, and the wire carries
whole page images. Rule: values are copied bit by bit unless the dtypes differ; FP8 saturates.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.kv_dtypes import BITS, DTYPE_NAMES, narrow, widen

TILE_ELEMENTS: Final = 4096
FP8_LARGEST: Final = 448.0


def pack_pages(
    src: Tensor,
    dst: Tensor,
    src_pages: Tensor,
    dst_pages: Tensor,
    num_tokens: int,
    *,
    skip_tokens: int = 0,
    first_head: int = 0,
) -> None:
    """Gather `num_tokens` consecutive tokens of `src_pages` into `dst_pages`, a page image each.

    `src` is `[num_pages, num_layers, 2, page_size, num_heads, head_dim]`, `dst` the same with its own page size, number
    of heads and dtype; inside of a page both are contiguous. The tokens begin `skip_tokens` into `src_pages[0]` and at
    the start of `dst_pages[0]`; places of the last target page that no token fills become zero. Heads
    `[first_head, first_head + dst's heads)` are taken. Indices are int64 on the GPU. Runs on its current stream. `dst`
    may be staging memory, or a peer's mapped pool: then this is the move, too.
    """
    _check(src, dst, src_pages, dst_pages, num_tokens, skip_tokens, first_head)
    _, num_layers, _, src_page_size, src_heads, head_dim = src.shape
    _, _, _, page_size, heads, _ = dst.shape
    columns = triton.next_power_of_2(heads * head_dim)
    rows = min(triton.next_power_of_2(page_size), max(1, TILE_ELEMENTS // columns))
    with torch.cuda.device_of(src):
        pack_pages_kernel[(len(dst_pages), num_layers * 2, triton.cdiv(page_size, rows))](
            src.view(BITS[src.element_size()]),
            dst.view(BITS[dst.element_size()]),
            src_pages,
            dst_pages,
            num_tokens,
            skip_tokens,
            src.stride(0),
            dst.stride(0),
            first_head * head_dim,
            SRC_PAGE_SIZE=src_page_size,
            DST_PAGE_SIZE=page_size,
            SRC_ROW=src_heads * head_dim,
            DST_ROW=heads * head_dim,
            SRC_DTYPE=DTYPE_NAMES[src.dtype],
            DST_DTYPE=DTYPE_NAMES[dst.dtype],
            ROWS=rows,
            COLUMNS=columns,
        )


def _check(
    src: Tensor,
    dst: Tensor,
    src_pages: Tensor,
    dst_pages: Tensor,
    num_tokens: int,
    skip_tokens: int,
    first_head: int,
) -> None:
    assert src.shape[1:3] == dst.shape[1:3], (src.shape, dst.shape)
    assert src.shape[5] == dst.shape[5], (src.shape, dst.shape)
    assert src[0].is_contiguous(), src.stride()
    assert dst[0].is_contiguous(), dst.stride()
    assert src_pages.dtype == dst_pages.dtype == torch.int64, (src_pages.dtype, dst_pages.dtype)
    assert 0 <= first_head <= src.shape[4] - dst.shape[4], (first_head, src.shape, dst.shape)
    assert 0 <= skip_tokens < src.shape[3], (skip_tokens, src.shape)
    assert 0 < num_tokens <= len(src_pages) * src.shape[3] - skip_tokens, (num_tokens, len(src_pages))
    assert len(dst_pages) == triton.cdiv(num_tokens, dst.shape[3]), (num_tokens, len(dst_pages))


@triton.jit
def pack_pages_kernel(
    src,
    dst,
    src_pages,
    dst_pages,
    num_tokens,
    skip_tokens,
    src_stride,  # elements a page
    dst_stride,
    first_column,
    SRC_PAGE_SIZE: tl.constexpr,
    DST_PAGE_SIZE: tl.constexpr,
    SRC_ROW: tl.constexpr,  # elements a token, layer, and K or V
    DST_ROW: tl.constexpr,
    SRC_DTYPE: tl.constexpr,
    DST_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,  # tokens a tile
    COLUMNS: tl.constexpr,
):
    page, plane = tl.program_id(0), tl.program_id(1)  # a plane: the K or the V of one layer
    slot = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = page * DST_PAGE_SIZE + slot
    known = (slot < DST_PAGE_SIZE) & (token < num_tokens)
    place = skip_tokens + token
    source_page = tl.load(src_pages + place // SRC_PAGE_SIZE, mask=known, other=0)
    source = source_page * src_stride + (plane * SRC_PAGE_SIZE + place % SRC_PAGE_SIZE) * SRC_ROW + first_column
    wanted = known[:, None] & (column < DST_ROW)[None, :]
    bits = tl.load(src + source[:, None] + column[None, :], mask=wanted, other=0)
    if SRC_DTYPE != DST_DTYPE:
        bits = narrow(widen(bits, SRC_DTYPE), DST_DTYPE)
    target = tl.load(dst_pages + page) * dst_stride + (plane * DST_PAGE_SIZE + slot) * DST_ROW
    inside = (slot < DST_PAGE_SIZE)[:, None] & (column < DST_ROW)[None, :]
    tl.store(dst + target[:, None] + column[None, :], bits, mask=inside)


def reference_pack_pages(
    src: Tensor,
    dst: Tensor,
    src_pages: Tensor,
    dst_pages: Tensor,
    num_tokens: int,
    *,
    skip_tokens: int = 0,
    first_head: int = 0,
) -> None:
    """Do the same, token by token."""
    page_size, heads = dst.shape[3:5]
    dst[dst_pages] = torch.zeros((), dtype=dst.dtype, device=dst.device)
    for token in range(num_tokens):
        page, slot = divmod(skip_tokens + token, src.shape[3])
        values = src[src_pages[page], :, :, slot, first_head : first_head + heads]
        if dst.dtype == torch.float8_e4m3fn:
            values = values.float().clamp(-FP8_LARGEST, FP8_LARGEST)  # torch makes NaN of what is larger
        dst[dst_pages[token // page_size], :, :, token % page_size] = values.to(dst.dtype)
