"""The structures of cpu/page_pack.h, for every library that includes it. Needs no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int64, c_void_p
from pathlib import Path
from typing import Final

from diptych.kernels.page_pack import PagePack

INCLUDE_FOLDER: Final = Path(__file__).with_name("cpu")
_CELL_TYPES: Final = {"float32": 0, "bfloat16": 1, "float16": 2, "fp8_e4m3": 3}


class PackStruct(Structure):
    """`struct page_pack`"""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            "num_layers",
            "head_dim",
            "src_page_size",
            "src_num_heads",
            "src_type",
            "first_head",
            "num_heads",
            "dst_page_size",
            "dst_type",
            "num_planes",
            "src_offset",
            "src_page_bytes",
        )
    )


class SourceStruct(Structure):
    """`struct source_pages`"""

    _fields_ = (("pool", c_void_p), ("pages", c_void_p), ("num_pages", c_int64))


class PartsStruct(Structure):
    """`struct page_parts`"""

    _fields_ = (
        ("num_rows", c_int64),
        ("head_bytes", c_int64),
        ("offset", c_int64),
        ("num_parts", c_int64),
        ("part_heads", POINTER(c_int64)),
    )


def pack_struct(pack: PagePack) -> PackStruct:
    return PackStruct(
        num_layers=pack.num_layers,
        head_dim=pack.head_dim,
        src_page_size=pack.src_page_size,
        src_num_heads=pack.src_num_heads,
        src_type=_CELL_TYPES[pack.src_dtype],
        first_head=pack.first_head,
        num_heads=pack.num_heads,
        dst_page_size=pack.dst_page_size,
        dst_type=_CELL_TYPES[pack.dst_dtype],
        num_planes=pack.num_planes,
        src_offset=pack.src_offset,
        src_page_bytes=pack.src_stride,
    )


def parts_struct(part_heads: Sequence[int], *, num_rows: int, head_nbytes: int, offset: int = 0) -> PartsStruct:
    heads = (ctypes.c_int64 * len(part_heads))(*part_heads)
    return PartsStruct(num_rows, head_nbytes, offset, len(part_heads), ctypes.cast(heads, POINTER(c_int64)))
