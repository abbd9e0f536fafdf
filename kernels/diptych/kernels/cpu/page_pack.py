"""`diptych.kernels.page_pack` in C."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import numpy as np

from diptych.kernels.cpu.library import load
from diptych.kernels.page_pack import U8, Indices, PagePack
from diptych.kernels.page_pack_structs import SourceStruct, pack_struct, parts_struct


def pack_page(pack: PagePack, pool: U8, src_pages: Indices, first_token: int) -> U8:
    """Return the image of one target page, `[image_nbytes]`."""
    return pack_rows(pack, pool, src_pages, first_token, 0, pack.num_rows)


def pack_rows(pack: PagePack, pool: U8, src_pages: Indices, first_token: int, start: int, end: int) -> U8:
    """Return the rows `[start, end)` of that image: a row is the taken heads of one token in one plane."""
    out = np.empty((end - start) * pack.row_nbytes, np.uint8)
    pages = np.ascontiguousarray(src_pages, np.int64)
    source = SourceStruct(pool.ctypes.data, pages.ctypes.data, len(pages))
    load().diptych_pack_rows(byref(pack_struct(pack)), byref(source), first_token, start, end - start, out.ctypes.data)
    return out


def unpack_page(
    page: U8, part_heads: Sequence[int], *, num_layers: int, page_size: int, head_nbytes: int, num_planes: int = 2
) -> None:
    """Put the heads of each token side by side, in place."""
    parts = parts_struct(part_heads, num_rows=num_layers * num_planes * page_size, head_nbytes=head_nbytes)
    scratch = np.empty_like(page)
    load().diptych_unpack_page(byref(parts), page.ctypes.data, scratch.ctypes.data)
