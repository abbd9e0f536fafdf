"""`page_pack.pack_page` on a GPU, for many target pages at once: the images of pages for a pool with another layout.

Images are packed one behind the other into memory of the source's GPU, from where they travel as pages do. Rule: shapes
are arguments, so that one kernel, compiled before any peer is known, serves peers of every layout; of the types only
the two are known to the compiler, and that heads are whole chunks.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.casts import narrow, widen
from diptych.kernels.page_pack import HEAD_STEP, PagePack

TILE_CELLS: Final = 4096
MAX_CHUNK_CELLS: Final = 128
NUM_WARPS: Final = 4
DTYPE_NBYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}
CELL_BITS: Final = {nbytes: tl.constexpr(dtype) for nbytes, dtype in ((1, tl.int8), (2, tl.int16), (4, tl.int32))}


def pack_pages(
    pack: PagePack,
    src: int,
    dst: int,
    src_pages: Tensor,
    first_tokens: Tensor,
    *,
    rows: tuple[int, int] | None = None,
    num_programs: int = 64,
) -> None:
    """Pack an image for each of `first_tokens`, one behind the other from address `dst` on.

    The first token of image i is number `first_tokens[i]` of those in `src_pages`, of the pool at address `src`; where
    they have no more, it is zero. Both are int64 on the pool's GPU. `rows`: the first row of each image that is packed,
    and how many; None for all. Runs on that GPU's current stream. Raises `ValueError` for head sizes that are no
    multiples of `HEAD_STEP`.
    """
    for array in (src_pages, first_tokens):
        assert array.dtype == torch.int64, array.dtype
        assert array.is_contiguous(), array.stride()
    src_nbytes = DTYPE_NBYTES[pack.src_dtype]
    constants = pack_constants(pack.src_dtype, pack.dst_dtype, pack.head_dim)
    first_row, num_rows = rows or (0, pack.num_rows)
    with torch.cuda.device_of(src_pages):
        pack_pages_kernel[(num_programs,)](
            src + pack.src_offset,
            dst,
            src_pages,
            first_tokens,
            len(first_tokens),
            len(src_pages),
            pack.src_stride // src_nbytes,
            pack.src_page_size,
            pack.src_num_heads * pack.head_dim,
            pack.first_head * pack.head_dim,
            pack.dst_page_size,
            pack.num_heads * pack.head_dim // constants["CHUNK"],
            first_row,
            num_rows,
            **constants,
            num_warps=NUM_WARPS,
        )


def pack_constants(src_dtype: str, dst_dtype: str, head_dim: int) -> dict[str, Any]:
    """Return what the compiler must know of packs between two types, of heads of multiples of `head_dim` numbers."""
    chunk = min(head_dim & -head_dim, MAX_CHUNK_CELLS)
    if chunk % HEAD_STEP:
        raise ValueError(f"heads of {head_dim} numbers are not packed on GPUs: multiples of {HEAD_STEP} are")
    types: dict[str, Any] = {"SRC_DTYPE": src_dtype, "DST_DTYPE": dst_dtype}
    bits = {f"{side}_BITS": CELL_BITS[DTYPE_NBYTES[types[f"{side}_DTYPE"]]] for side in ("SRC", "DST")}
    return types | bits | {"CHUNK": chunk, "TILE": TILE_CELLS // chunk}


@triton.jit
def pack_pages_kernel(
    src,
    dst,
    src_pages,
    first_tokens,
    num_images,
    num_src_pages,
    src_stride,  # cells a page
    src_page_size,
    src_cells,  # of a token in a plane
    first_cell,  # of those that are taken
    dst_page_size,
    row_chunks,  # that are taken of a row: a row is a token in one plane of a layer
    first_row,  # of each image
    num_rows,
    SRC_DTYPE: tl.constexpr,
    DST_DTYPE: tl.constexpr,
    SRC_BITS: tl.constexpr,
    DST_BITS: tl.constexpr,
    CHUNK: tl.constexpr,  # cells
    TILE: tl.constexpr,  # chunks
):
    src_numbers = tl.multiple_of(src.to(tl.pointer_type(SRC_BITS)), 16)
    dst_numbers = tl.multiple_of(dst.to(tl.pointer_type(DST_BITS)), 16)
    column = tl.arange(0, CHUNK)
    image_chunks = num_rows * row_chunks
    tiles_an_image = tl.cdiv(image_chunks, TILE)
    tile = tl.program_id(0)
    while tile < num_images * tiles_an_image:  # Triton's interpreter can't have a `range` of such numbers
        image = tile // tiles_an_image
        chunk = tile % tiles_an_image * TILE + tl.arange(0, TILE)
        inside = chunk < image_chunks
        row = first_row + chunk // row_chunks
        token = tl.load(first_tokens + image).to(tl.int32) + row % dst_page_size
        place = token // src_page_size
        exists = inside & (place < num_src_pages)
        page = tl.load(src_pages + place, mask=exists, other=0)
        src_row = (row // dst_page_size * src_page_size + token % src_page_size).to(tl.int64)
        source = page * src_stride + src_row * src_cells + first_cell + chunk % row_chunks * CHUNK
        bits = tl.load(src_numbers + source[:, None] + column[None, :], mask=exists[:, None], other=0)
        if SRC_DTYPE != DST_DTYPE:
            bits = narrow(widen(bits, SRC_DTYPE), DST_DTYPE)
        target = (image.to(tl.int64) * image_chunks + chunk) * CHUNK
        tl.store(dst_numbers + target[:, None] + column[None, :], bits, mask=inside[:, None])
        tile += tl.num_programs(0)
