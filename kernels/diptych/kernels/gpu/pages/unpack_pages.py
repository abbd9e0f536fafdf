"""`page_pack.unpack_page` on a GPU, for many pages at once: parts that several ranks wrote become a page, in place.

The region of some pages is copied to scratch memory, then each part of it is put where its heads belong. Rules: only
scratch pages hold a page meanwhile, never memory as large as what was received; shapes are arguments, so that one
kernel serves peers of every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.pages.page_mover import WORD_NBYTES

TILE_WORDS: Final = 2048
MAX_CHUNK_WORDS: Final = 32
NUM_WARPS: Final = 4


def unpack_pages(
    pool: Tensor,
    pages: Tensor,
    part_heads: Sequence[int],
    scratch: Tensor,
    *,
    num_rows: int,
    head_nbytes: int,
    num_programs: int = 64,
) -> None:
    """Put the heads of each token side by side in `pages` of `pool`.

    `pool` is a region of all pages, `[num_pages, region_nbytes]` of uint8, `scratch` a uint8 buffer of at least one
    such page; more of it makes fewer launches. `pages` is int64 on the GPU and names no page twice. Runs on its
    current stream. Raises `ValueError` for heads of a token that are no multiples of 16 bytes.
    """
    words, copies = pool.view(torch.int64), scratch.view(torch.int64)
    region_words, batch = words.shape[1], len(copies) // words.shape[1]
    assert num_rows * sum(part_heads) * head_nbytes == pool.shape[1], (part_heads, pool.shape)
    assert batch > 0, f"scratch of {len(scratch)} bytes is less than a page of {pool.shape[1]}"
    constants = unpack_constants(head_nbytes)
    head_chunks = head_nbytes // WORD_NBYTES // constants["CHUNK"]
    with torch.cuda.device_of(pool):
        for first in range(0, len(pages), batch):
            some = pages[first : first + batch]
            copied = copies[: len(some) * region_words].view(len(some), region_words)
            torch.index_select(words, 0, some, out=copied)
            for part, heads in enumerate(part_heads):
                unpack_part_kernel[(num_programs,)](
                    copied.data_ptr(),
                    words.data_ptr(),
                    some,
                    len(some),
                    region_words,
                    words.stride(0),
                    num_rows,
                    sum(part_heads) * head_chunks,
                    sum(part_heads[:part]) * head_chunks,
                    heads * head_chunks,
                    **constants,
                    num_warps=NUM_WARPS,
                )


def unpack_constants(head_nbytes: int) -> dict[str, int]:
    """Return what the compiler must know of heads that are multiples of `head_nbytes` for a token in a plane."""
    words = head_nbytes // WORD_NBYTES
    if head_nbytes % (2 * WORD_NBYTES):
        raise ValueError(f"heads of {head_nbytes} bytes are not put together on GPUs: multiples of 16 are")
    chunk = min(words & -words, MAX_CHUNK_WORDS)
    return {"CHUNK": chunk, "TILE": TILE_WORDS // chunk}


@triton.jit
def unpack_part_kernel(
    copied,
    pool,
    pages,
    num_pages,
    region_words,
    page_words,  # from one page to the next
    num_rows,  # a row is a token in one plane of a layer
    row_chunks,
    first_chunk,  # of a row where the part's heads belong
    part_chunks,  # that the part has of a row
    CHUNK: tl.constexpr,  # words
    TILE: tl.constexpr,  # chunks
):
    copied_words = tl.multiple_of(copied.to(tl.pointer_type(tl.int64)), 16)
    pool_words = tl.multiple_of(pool.to(tl.pointer_type(tl.int64)), 16)
    column = tl.arange(0, CHUNK)
    part_start = num_rows * first_chunk * CHUNK
    tiles_a_page = tl.cdiv(num_rows * part_chunks, TILE)
    tile = tl.program_id(0)
    while tile < num_pages * tiles_a_page:  # Triton's interpreter can't have a `range` of such numbers with NumPy 2.4
        number = tile // tiles_a_page
        chunk = tile % tiles_a_page * TILE + tl.arange(0, TILE)
        inside = (chunk < num_rows * part_chunks)[:, None]
        source = number.to(tl.int64) * region_words + part_start + chunk * CHUNK
        values = tl.load(copied_words + source[:, None] + column[None, :], mask=inside)
        place = (chunk // part_chunks * row_chunks + first_chunk + chunk % part_chunks) * CHUNK
        target = tl.load(pages + number) * page_words + place
        tl.store(pool_words + target[:, None] + column[None, :], values, mask=inside)
        tile += tl.num_programs(0)
