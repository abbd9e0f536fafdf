"""The kernels of KV transfer, for `test_compile.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ahead_of_time import Kernel

from diptych.kernels.gpu.pages.pack_pages import CELL_BITS, DTYPE_NBYTES, pack_pages_kernel
from diptych.kernels.gpu.pages.page_digest import KEYS, page_digest_kernel
from diptych.kernels.gpu.pages.page_mover import move_pages_kernel
from diptych.kernels.gpu.pages.unpack_pages import unpack_part_kernel

WORDS, CELLS = frozenset({"v2.b64"}), frozenset({"v4.b32"})


def mover(name: str, rows: int) -> Kernel:
    types = {"src": "i64", "dst": "i64", "src_pages": "*i64", "dst_pages": "*i64"}
    types |= {"num_pages": "i32", "page_words": "i32", "num_words": "i32", "done": "*i32"}
    tile = {"ROWS": rows, "COLUMNS": 4096 // rows, "ALIGNMENT": 16}
    return Kernel(name, move_pages_kernel, types, tile, frozenset({"num_pages"}), num_warps=8, stores=WORDS)


def digest() -> Kernel:
    types = {"total": "*i64", "pool": "i64", "pages": "*i64", "offsets": "*i64"}
    types |= {"num_pages": "i32", "page_words": "i32", "num_words": "i32"}
    constants = {"ROWS": 1, "COLUMNS": 2048, "ALIGNMENT": 16, **KEYS}
    return Kernel("digest", page_digest_kernel, types, constants, frozenset({"num_pages"}), loads=WORDS)


def pack(name: str, src_dtype: str, dst_dtype: str) -> Kernel:
    types = {"src": "i64", "dst": "i64", "src_pages": "*i64", "first_tokens": "*i64", "dst_pages": "*i64"}
    types |= {"num_src_pages": "i32", "src_stride": "i32", "dst_stride": "i32"}
    constants: dict[str, Any] = {"SRC_PAGE_SIZE": 16, "DST_PAGE_SIZE": 64, "SRC_CELLS": 1024}
    constants |= {"FIRST_CELL": 512, "CELLS": 512, "SRC_DTYPE": src_dtype, "DST_DTYPE": dst_dtype}
    for side, dtype in (("SRC", src_dtype), ("DST", dst_dtype)):
        constants |= {f"{side}_BITS": CELL_BITS[DTYPE_NBYTES[dtype]], f"{side}_ALIGNMENT": 16}
    constants |= {"ROWS": 8, "COLUMNS": 512}
    any_number = frozenset({"num_src_pages"})
    return Kernel(name, pack_pages_kernel, types, constants, any_number, loads=CELLS, stores=CELLS)


def unpack() -> Kernel:
    types = {"copied": "*i64", "words": "*i64", "pages": "*i64", "region_words": "i32"}
    types |= {"page_words": "i32", "part_words": "i32", "part_start": "i32"}
    constants = {"FIRST": 128, "PART_ROW": 128, "ROW": 256, "TILE": 2048}
    return Kernel("unpack", unpack_part_kernel, types, constants, loads=WORDS, stores=WORDS)


def kernels() -> Iterator[Kernel]:
    yield mover("mover, large pages", rows=1)
    yield mover("mover, small pages", rows=8)
    yield digest()
    yield pack("pack, same dtype", "bfloat16", "bfloat16")
    yield pack("pack, to FP8", "bfloat16", "fp8_e4m3")
    yield pack("pack, from FP8", "fp8_e4m3", "bfloat16")
    yield pack("pack, from float32", "float32", "bfloat16")
    yield unpack()
