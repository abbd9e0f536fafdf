"""The digest of KV pages on a GPU, equal bit for bit to the one of host pages.

A 64-bit sum over the 8-byte words of what was written, each mixed with its byte offset in the pool that it was written
to. `diptych.kvtransfer.digest` is the definition and says why; a test holds the two together.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.pages.page_mover import WORD_NBYTES, tile_of

TILE_WORDS: Final = 2048
NUM_PROGRAMS: Final = 128
KEY_STEP: Final = 0x9E37_79B9_7F4A_7C15
KEY_START: Final = 0xD6E8_FEB8_6659_FD93
MIX_1: Final = 0x9E37_79B1_85EB_CA87
MIX_2: Final = 0xC2B2_AE3D_27D4_EB4F
KEYS: Final = {"STEP": KEY_STEP, "START": KEY_START, "FACTOR_1": MIX_1, "FACTOR_2": MIX_2}
MASK: Final = 2**64 - 1


def add_page_digest(
    total: Tensor,
    pool: int,
    pages: Tensor,
    page_nbytes: int,
    offsets: Tensor,
    *,
    window: tuple[int, int] | None = None,
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Add to `total` (int64, one entry) the digest of `pages` of the pool at address `pool`; see `as_digest`.

    `offsets[i]` is the byte of the target's pool where the first byte of page i's window lies: the pool's own if it is
    the target that asks, else where the bytes are written to. `window`: byte offset and length of the part of each page
    that counts, None for all. Indices and offsets are int64 on the pool's GPU; everything else is a multiple of 8.
    The sum runs on that GPU's current stream, and its terms may come in any order, from any number of calls.
    """
    first, nbytes = window or (0, page_nbytes)
    assert total.dtype == pages.dtype == offsets.dtype == torch.int64, (total.dtype, pages.dtype, offsets.dtype)
    assert pages.shape == offsets.shape, (pages.shape, offsets.shape)
    assert pages.is_contiguous(), pages.stride()
    assert offsets.is_contiguous(), offsets.stride()
    assert 0 <= first < first + nbytes <= page_nbytes, (first, nbytes, page_nbytes)
    assert (pool | page_nbytes | first | nbytes) % WORD_NBYTES == 0, (pool, page_nbytes, first, nbytes)
    with torch.cuda.device_of(pages):
        page_digest_kernel[(num_programs,)](
            total,
            pool + first,
            pages,
            offsets,
            len(pages),
            page_nbytes // WORD_NBYTES,
            nbytes // WORD_NBYTES,
            **tile_of(TILE_WORDS, nbytes, pool | first),
            **KEYS,
        )


def as_digest(total: Tensor) -> int:
    """Return what `add_page_digest` added up. Waits for the GPU."""
    return int(total.item()) & MASK


@triton.jit
def page_digest_kernel(
    total,
    pool,
    pages,
    offsets,
    num_pages,
    page_words,
    num_words,
    ROWS: tl.constexpr,  # pages a tile
    COLUMNS: tl.constexpr,  # words of each
    ALIGNMENT: tl.constexpr,  # bytes, of the address
    STEP: tl.constexpr,
    START: tl.constexpr,
    FACTOR_1: tl.constexpr,
    FACTOR_2: tl.constexpr,
):
    pool_words = tl.multiple_of(pool.to(tl.pointer_type(tl.uint64)), ALIGNMENT)
    tiles_a_page = tl.cdiv(num_words, COLUMNS)
    num_tiles = tl.cdiv(num_pages, ROWS) * tiles_a_page
    sums = tl.zeros((ROWS, COLUMNS), tl.uint64)
    tile = tl.program_id(0)
    while tile < num_tiles:  # Triton's interpreter can't have a `range` of such numbers with NumPy 2.4
        row = tile // tiles_a_page * ROWS + tl.arange(0, ROWS)
        column = tile % tiles_a_page * COLUMNS + tl.arange(0, COLUMNS)
        page = tl.load(pages + row, mask=row < num_pages, other=0) * page_words
        place = tl.load(offsets + row, mask=row < num_pages, other=0)
        inside = (row < num_pages)[:, None] & (column < num_words)[None, :]
        words = tl.load(pool_words + page[:, None] + column[None, :], mask=inside, other=0)
        offset = (place[:, None] + column[None, :] * 8).to(tl.uint64)
        mixed = (words ^ (offset * STEP + START)) * FACTOR_1
        mixed = (mixed ^ (mixed >> 32)) * FACTOR_2
        sums += tl.where(inside, mixed ^ (mixed >> 29), 0)
        tile += tl.num_programs(0)
    tl.atomic_add(total, tl.sum(tl.sum(sums, axis=1), axis=0).to(tl.int64), sem="relaxed")


def reference_page_digest(pool: Tensor, pages: Tensor, offsets: Tensor, window: tuple[int, int] | None = None) -> int:
    """Return the same of a pool `[num_pages, page_nbytes]` of uint8. int64 wraps around as uint64 does."""
    first, nbytes = window or (0, pool.shape[1])
    words = pool[pages, first : first + nbytes].contiguous().view(torch.int64)
    places = offsets[:, None] + torch.arange(words.shape[1], device=pool.device) * WORD_NBYTES
    mixed = (words ^ (places * _signed(KEY_STEP) + _signed(KEY_START))) * _signed(MIX_1)
    mixed = (mixed ^ (mixed >> 32 & 0xFFFF_FFFF)) * _signed(MIX_2)
    return int((mixed ^ (mixed >> 29 & 0x7_FFFF_FFFF)).sum()) & MASK


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant
