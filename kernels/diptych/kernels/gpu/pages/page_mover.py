"""Copies KV pages from one GPU's pool straight into another pool: a peer GPU's mapped memory, or a pool of our own.

One launch moves a whole batch of scattered pages over NVLink with 16-byte stores, at any page size from 4 KiB; copies
page by page would cost a launch each. Rule: a page is bytes, nothing here knows what they mean.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_NBYTES: Final = 8
VECTOR_NBYTES: Final = 16  # what one thread stores at once
TILE_WORDS: Final = 4096  # 32 KiB: with 32 programs, one MiB is on its way, what NVLink's latency asks for
NUM_WARPS: Final = 8


def move_pages(
    src: int,
    dst: int,
    src_pages: Tensor,
    dst_pages: Tensor,
    page_nbytes: int,
    done: Tensor,
    *,
    window: tuple[int, int] | None = None,
    num_programs: int = 64,
) -> None:
    """Copy page `src_pages[i]` of the pool at address `src` to page `dst_pages[i]` of the pool at address `dst`.

    Indices are int64 tensors on the source's GPU, and the copy runs on that GPU's current stream. `window`: byte offset
    and length of the part of each page that is copied, None for all of it. Addresses, `page_nbytes` and `window` are
    multiples of 8; stores are 16 bytes wide where the addresses are multiples of 16, page and window of 128.
    `num_programs` is how many blocks of `NUM_WARPS` warps share the work: how much of the GPU this takes from the
    forward pass beside it.

    Each program adds 1 to `done` (int32, one entry, on this GPU or pinned) after its stores, which are then visible to
    the whole system, the peer GPU included. The kernel's end says the same of all of them.
    """
    offset, nbytes = window or (0, page_nbytes)
    assert src_pages.dtype == dst_pages.dtype == torch.int64, (src_pages.dtype, dst_pages.dtype)
    assert src_pages.shape == dst_pages.shape, (src_pages.shape, dst_pages.shape)
    assert src_pages.is_contiguous(), src_pages.stride()
    assert dst_pages.is_contiguous(), dst_pages.stride()
    assert done.dtype == torch.int32, done.dtype
    assert 0 <= offset < offset + nbytes <= page_nbytes, (offset, nbytes, page_nbytes)
    assert (src | dst | page_nbytes | offset | nbytes) % WORD_NBYTES == 0, (src, dst, page_nbytes, offset, nbytes)
    with torch.cuda.device_of(src_pages):
        move_pages_kernel[(num_programs,)](
            src + offset,
            dst + offset,
            src_pages,
            dst_pages,
            len(src_pages),
            page_nbytes // WORD_NBYTES,
            nbytes // WORD_NBYTES,
            done,
            **tile_of(TILE_WORDS, nbytes, src | dst | offset),
            num_warps=NUM_WARPS,
        )


def tile_of(tile_words: int, nbytes: int, addresses: int = 0) -> dict[str, int]:
    """Return the shape of a tile of windows of `nbytes`, and the alignment of addresses whose bits are `addresses`."""
    columns = min(tile_words, triton.next_power_of_2(nbytes // WORD_NBYTES))
    alignment = WORD_NBYTES if addresses % VECTOR_NBYTES else VECTOR_NBYTES
    return {"ROWS": tile_words // columns, "COLUMNS": columns, "ALIGNMENT": alignment}


@triton.jit
def move_pages_kernel(
    src,
    dst,
    src_pages,
    dst_pages,
    num_pages,
    page_words,
    num_words,
    done,
    ROWS: tl.constexpr,  # pages a tile
    COLUMNS: tl.constexpr,  # words of each
    ALIGNMENT: tl.constexpr,  # bytes, of both addresses
):
    src_words = tl.multiple_of(src.to(tl.pointer_type(tl.int64)), ALIGNMENT)
    dst_words = tl.multiple_of(dst.to(tl.pointer_type(tl.int64)), ALIGNMENT)
    tiles_a_page = tl.cdiv(num_words, COLUMNS)
    num_tiles = tl.cdiv(num_pages, ROWS) * tiles_a_page
    tile = tl.program_id(0)
    while tile < num_tiles:  # Triton's interpreter can't have a `range` of such numbers with NumPy 2.4
        row = tile // tiles_a_page * ROWS + tl.arange(0, ROWS)
        column = tile % tiles_a_page * COLUMNS + tl.arange(0, COLUMNS)
        source = tl.load(src_pages + row, mask=row < num_pages, other=0) * page_words
        target = tl.load(dst_pages + row, mask=row < num_pages, other=0) * page_words
        inside = (row < num_pages)[:, None] & (column < num_words)[None, :]
        words = tl.load(src_words + source[:, None] + column[None, :], mask=inside, eviction_policy="evict_first")
        tl.store(dst_words + target[:, None] + column[None, :], words, mask=inside)
        tile += tl.num_programs(0)
    tl.debug_barrier()  # the stores of all threads come before the release of the one that adds
    tl.atomic_add(done, 1, sem="release", scope="sys")


def reference_move_pages(
    src: Tensor, dst: Tensor, src_pages: Tensor, dst_pages: Tensor, window: tuple[int, int] | None = None
) -> None:
    """Do the same to pools `[num_pages, page_nbytes]` of uint8."""
    offset, nbytes = window or (0, src.shape[1])
    dst[dst_pages, offset : offset + nbytes] = src[src_pages, offset : offset + nbytes]
