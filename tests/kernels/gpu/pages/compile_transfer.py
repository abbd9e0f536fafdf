"""The kernels of KV transfer, for `test_compile.py`."""

from __future__ import annotations

from collections.abc import Iterator

from ahead_of_time import Kernel

from diptych.kernels.gpu.pages.pack_pages import pack_constants, pack_pages_kernel
from diptych.kernels.gpu.pages.page_digest import KEYS, page_digest_kernel
from diptych.kernels.gpu.pages.page_mover import move_pages_kernel
from diptych.kernels.gpu.pages.unpack_pages import unpack_constants, unpack_part_kernel

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


def pack(name: str, src_dtype: str, dst_dtype: str, head_dim: int = 128) -> Kernel:
    types = {"src": "i64", "dst": "i64", "src_pages": "*i64", "first_tokens": "*i64"}
    any_number = ["num_images", "num_src_pages", "src_page_size", "dst_page_size"]
    any_number += ["row_chunks", "first_row", "num_rows"]
    types |= dict.fromkeys((*any_number, "src_stride", "src_cells", "first_cell"), "i32")
    constants = pack_constants(src_dtype, dst_dtype, head_dim)
    return Kernel(name, pack_pages_kernel, types, constants, frozenset(any_number), loads=CELLS, stores=CELLS)


def unpack(name: str, head_nbytes: int) -> Kernel:
    types = {"copied": "i64", "pool": "i64", "pages": "*i64"}
    any_number = ("num_pages", "num_rows", "row_chunks", "first_chunk", "part_chunks")
    types |= dict.fromkeys((*any_number, "region_words", "page_words"), "i32")
    constants = unpack_constants(head_nbytes)
    return Kernel(name, unpack_part_kernel, types, constants, frozenset(any_number), loads=WORDS, stores=WORDS)


def kernels() -> Iterator[Kernel]:
    yield mover("mover, large pages", rows=1)
    yield mover("mover, small pages", rows=8)
    yield digest()
    yield pack("pack, same dtype", "bfloat16", "bfloat16")
    yield pack("pack, to FP8", "bfloat16", "fp8_e4m3")
    yield pack("pack, from FP8", "fp8_e4m3", "bfloat16")
    yield pack("pack, from float32", "float32", "bfloat16")
    yield pack("pack, heads of 16", "fp8_e4m3", "fp8_e4m3", 16)
    yield unpack("unpack", 256)
    yield unpack("unpack, heads of 16 bytes", 16)
