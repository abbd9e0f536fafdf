"""`page_pack.pack_page` on a GPU, for many target pages at once: the images of pages for a pool with another layout.

Images may be staged on the source's GPU, or go straight into the peer's mapped pool: then packing is the move, too.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.casts import narrow, widen
from diptych.kernels.page_pack import PagePack

TILE_CELLS: Final = 4096
VECTOR_NBYTES: Final = 16
DTYPE_NBYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}
CELL_BITS: Final = {nbytes: tl.constexpr(dtype) for nbytes, dtype in ((1, tl.int8), (2, tl.int16), (4, tl.int32))}


def pack_pages(
    pack: PagePack,
    src: int,
    dst: int,
    src_pages: Tensor,
    first_tokens: Tensor,
    dst_pages: Tensor,
    dst_page_nbytes: int,
) -> None:
    """Make an image for each of `dst_pages` of the pool at address `dst`, out of `src_pages` of the pool at `src`.

    The image of `dst_pages[i]` begins at byte `dst + dst_pages[i] * dst_page_nbytes`, so a part that lands further
    inside of a page has its offset in `dst`. Its first token is number `first_tokens[i]` of those in `src_pages`; where
    they have no more, it is zero. All three are int64 on the source's GPU. Runs on that GPU's current stream.
    """
    for array in (src_pages, first_tokens, dst_pages):
        assert array.dtype == torch.int64, array.dtype
        assert array.is_contiguous(), array.stride()
    assert first_tokens.shape == dst_pages.shape, (first_tokens.shape, dst_pages.shape)
    src_nbytes, dst_nbytes = DTYPE_NBYTES[pack.src_dtype], DTYPE_NBYTES[pack.dst_dtype]
    src += pack.src_offset
    assert src % src_nbytes == pack.src_stride % src_nbytes == 0, (src, pack.src_stride)
    assert dst % dst_nbytes == dst_page_nbytes % dst_nbytes == 0, (dst, dst_page_nbytes)
    cells = pack.num_heads * pack.head_dim
    columns = triton.next_power_of_2(cells)
    rows = min(triton.next_power_of_2(pack.dst_page_size), max(1, TILE_CELLS // columns))
    grid = (len(dst_pages), pack.num_layers * pack.num_planes, triton.cdiv(pack.dst_page_size, rows))
    with torch.cuda.device_of(src_pages):
        pack_pages_kernel[grid](
            src,
            dst,
            src_pages,
            first_tokens,
            dst_pages,
            len(src_pages),
            pack.src_stride // src_nbytes,
            dst_page_nbytes // dst_nbytes,
            SRC_PAGE_SIZE=pack.src_page_size,
            DST_PAGE_SIZE=pack.dst_page_size,
            SRC_CELLS=pack.src_num_heads * pack.head_dim,
            FIRST_CELL=pack.first_head * pack.head_dim,
            CELLS=cells,
            SRC_DTYPE=pack.src_dtype,
            DST_DTYPE=pack.dst_dtype,
            SRC_BITS=CELL_BITS[src_nbytes],
            DST_BITS=CELL_BITS[dst_nbytes],
            SRC_ALIGNMENT=src_nbytes if src % VECTOR_NBYTES else VECTOR_NBYTES,
            DST_ALIGNMENT=dst_nbytes if dst % VECTOR_NBYTES else VECTOR_NBYTES,
            ROWS=rows,
            COLUMNS=columns,
        )


@triton.jit
def pack_pages_kernel(
    src,
    dst,
    src_pages,
    first_tokens,
    dst_pages,
    num_src_pages,
    src_stride,  # cells a page
    dst_stride,
    SRC_PAGE_SIZE: tl.constexpr,
    DST_PAGE_SIZE: tl.constexpr,
    SRC_CELLS: tl.constexpr,  # of a token in a plane
    FIRST_CELL: tl.constexpr,
    CELLS: tl.constexpr,  # that are taken
    SRC_DTYPE: tl.constexpr,
    DST_DTYPE: tl.constexpr,
    SRC_BITS: tl.constexpr,
    DST_BITS: tl.constexpr,
    SRC_ALIGNMENT: tl.constexpr,  # bytes, of the address
    DST_ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,  # tokens a tile
    COLUMNS: tl.constexpr,
):
    src_cells = tl.multiple_of(src.to(tl.pointer_type(SRC_BITS)), SRC_ALIGNMENT)
    dst_cells = tl.multiple_of(dst.to(tl.pointer_type(DST_BITS)), DST_ALIGNMENT)
    image, plane = tl.program_id(0), tl.program_id(1)
    slot = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = tl.load(first_tokens + image) + slot
    place, exists = token // SRC_PAGE_SIZE, token < num_src_pages * SRC_PAGE_SIZE
    page = tl.load(src_pages + place, mask=exists, other=0) * src_stride
    source = page + (plane * SRC_PAGE_SIZE + token % SRC_PAGE_SIZE) * SRC_CELLS + FIRST_CELL
    inside = (slot < DST_PAGE_SIZE)[:, None] & (column < CELLS)[None, :]
    bits = tl.load(src_cells + source[:, None] + column[None, :], mask=inside & exists[:, None], other=0)
    if SRC_DTYPE != DST_DTYPE:
        bits = narrow(widen(bits, SRC_DTYPE), DST_DTYPE)
    target = tl.load(dst_pages + image) * dst_stride + (plane * DST_PAGE_SIZE + slot) * CELLS
    tl.store(dst_cells + target[:, None] + column[None, :], bits, mask=inside)
