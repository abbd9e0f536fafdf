"""Puts the parts of a page that several ranks wrote, one behind the other, into the page's own order, in place.

R source ranks share a target page: part r holds the heads of rank r and landed packed, `[R, num_layers, 2, page_size,
num_heads / R, head_dim]`. Attention reads `[num_layers, 2, page_size, num_heads, head_dim]`. Rule: only scratch pages
hold a page meanwhile, never memory as large as what was received.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_NBYTES: Final = 8
TILE_WORDS: Final = 2048


def unpack_pages(pool: Tensor, pages: Tensor, num_parts: int, scratch: Tensor) -> None:
    """Bring `pages` of `pool` into order; each holds `num_parts` parts.

    `pool` is `[num_pages, num_layers, 2, page_size, num_heads, head_dim]`, `scratch` a contiguous uint8 buffer of at
    least one page; more pages of it make fewer launches. `pages` is int64 on the GPU and names no page twice. Runs on
    its current stream.
    """
    assert pool.is_contiguous(), pool.stride()
    assert pool.shape[4] % num_parts == 0, (pool.shape, num_parts)
    words = pool.view(torch.uint8).view(len(pool), -1).view(torch.int64)
    part_row_nbytes = pool.shape[4] // num_parts * pool.shape[5] * pool.element_size()
    assert part_row_nbytes % WORD_NBYTES == 0, f"{part_row_nbytes} bytes a token and part, not a multiple of 8"
    page_words = words.shape[1]
    copies = scratch.view(torch.int64)
    batch = len(copies) // page_words
    assert batch > 0, f"scratch of {scratch.nbytes} bytes is less than a page of {page_words * WORD_NBYTES}"
    with torch.cuda.device_of(pool):
        for first in range(0, len(pages), batch):
            some = pages[first : first + batch]
            copied = copies[: len(some) * page_words].view(len(some), page_words)
            torch.index_select(words, 0, some, out=copied)
            unpack_pages_kernel[(len(some), triton.cdiv(page_words, TILE_WORDS))](
                copied,
                words,
                some,
                page_words,
                PARTS=num_parts,
                PART_ROW=part_row_nbytes // WORD_NBYTES,
                TILE=TILE_WORDS,
            )


@triton.jit
def unpack_pages_kernel(
    copied,
    words,
    pages,
    page_words,
    PARTS: tl.constexpr,
    PART_ROW: tl.constexpr,  # words a token, layer, K or V, and part
    TILE: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    target = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row, part, column = target // (PARTS * PART_ROW), target // PART_ROW % PARTS, target % PART_ROW
    source = part * (page_words // PARTS) + row * PART_ROW + column
    inside = target < page_words
    page = tl.load(pages + number) * page_words
    tl.store(words + page + target, tl.load(copied + number * page_words + source, mask=inside), mask=inside)


def reference_unpack_pages(pool: Tensor, pages: Tensor, num_parts: int) -> None:
    """Do the same with a copy of all pages."""
    _, num_layers, _, page_size, num_heads, head_dim = pool.shape
    parts = pool[pages].reshape(len(pages), num_parts, num_layers, 2, page_size, num_heads // num_parts, head_dim)
    pool[pages] = parts.permute(0, 2, 3, 4, 1, 5, 6).reshape(len(pages), *pool.shape[1:])
