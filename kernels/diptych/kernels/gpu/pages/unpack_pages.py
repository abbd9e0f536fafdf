"""`page_pack.unpack_page` on a GPU, for many pages at once: parts that several ranks wrote become a page, in place.

Rule: only scratch pages hold a page meanwhile, never memory as large as what was received.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_WORDS: Final = 2048
WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unpack_pages(
    pool: Tensor,
    pages: Tensor,
    part_heads: Sequence[int],
    scratch: Tensor,
    *,
    num_rows: int,
    head_nbytes: int,
) -> None:
    """Put the heads of each token side by side in `pages` of `pool`.

    `pool` is a region of all pages, `[num_pages, region_nbytes]` of uint8, `scratch` a uint8 buffer of at least one
    such page; more of it makes fewer launches. `pages` is int64 on the GPU and names no page twice. Runs on its
    current stream.
    """
    word = math.gcd(head_nbytes, max(WORDS))
    words, copies = pool.view(WORDS[word]), scratch.view(WORDS[word])
    region_words, batch = words.shape[1], len(copies) // words.shape[1]
    assert num_rows * sum(part_heads) * head_nbytes == pool.shape[1], (part_heads, pool.shape)
    assert batch > 0, f"scratch of {len(scratch)} bytes is less than a page of {pool.shape[1]}"
    with torch.cuda.device_of(pool):
        for first in range(0, len(pages), batch):
            some = pages[first : first + batch]
            copied = copies[: len(some) * region_words].view(len(some), region_words)
            torch.index_select(words, 0, some, out=copied)
            for part, heads in enumerate(part_heads):
                first_word = sum(part_heads[:part]) * head_nbytes // word
                part_row = heads * head_nbytes // word
                unpack_part_kernel[(len(some), triton.cdiv(num_rows * part_row, TILE_WORDS))](
                    copied,
                    words,
                    some,
                    region_words,
                    words.stride(0),
                    num_rows * part_row,
                    num_rows * first_word,
                    FIRST=first_word,
                    PART_ROW=part_row,
                    ROW=region_words // num_rows,
                    TILE=TILE_WORDS,
                )


@triton.jit
def unpack_part_kernel(
    copied,
    words,
    pages,
    region_words,
    page_words,  # from one page to the next
    part_words,
    part_start,  # the word of the region where the part landed
    FIRST: tl.constexpr,  # word of a row where the part's heads belong; a row is a token in one plane of a layer
    PART_ROW: tl.constexpr,  # words of a row that the part has
    ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = place < part_words
    values = tl.load(copied + number * region_words + part_start + place, mask=inside)
    target = place // PART_ROW * ROW + FIRST + place % PART_ROW
    tl.store(words + tl.load(pages + number) * page_words + target, values, mask=inside)
