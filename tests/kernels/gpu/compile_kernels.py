"""Compiles every kernel for an H200, which it does not need, and prints `{"kernel": ptx}` as JSON.

A process of its own: in the tests' process, kernels belong to the interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diptych.kernels.gpu_page_pack import CELL_BITS, DTYPE_NBYTES, pack_pages_kernel
from diptych.kernels.gpu_page_unpack import unpack_part_kernel
from diptych.kernels.page_digest import KEY_START, KEY_STEP, MIX_1, MIX_2, page_digest_kernel
from diptych.kernels.page_mover import move_pages_kernel

TARGET = GPUTarget("cuda", 90, 32)
MULTIPLES_OF_16 = ["tt.divisibility", 16]


def ptx(kernel: Any, types: Mapping[str, str], any_number: set[str], constants: Mapping[str, Any], warps: int) -> str:
    """Return the code for arguments that are multiples of 16, as addresses and sizes are, but for `any_number`."""
    aligned = {(i,): [MULTIPLES_OF_16] for i, name in enumerate(types) if name not in any_number}
    source = ASTSource(kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants, aligned)
    return str(triton.compile(source, target=TARGET, options={"num_warps": warps}).asm["ptx"])


def mover(rows: int) -> str:
    types = {"src": "i64", "dst": "i64", "src_pages": "*i64", "dst_pages": "*i64"}
    types |= {"num_pages": "i32", "page_words": "i32", "num_words": "i32", "done": "*i32"}
    tile = {"ROWS": rows, "COLUMNS": 4096 // rows, "ALIGNMENT": 16}
    return ptx(move_pages_kernel, types, {"num_pages"}, tile, 8)


def digest() -> str:
    types = {"total": "*i64", "pool": "i64", "pages": "*i64", "offsets": "*i64"}
    types |= {"num_pages": "i32", "page_words": "i32", "num_words": "i32"}
    keys = {"STEP": KEY_STEP, "START": KEY_START, "FACTOR_1": MIX_1, "FACTOR_2": MIX_2}
    return ptx(page_digest_kernel, types, {"num_pages"}, {"ROWS": 1, "COLUMNS": 2048, "ALIGNMENT": 16, **keys}, 4)


def pack(src_dtype: str, dst_dtype: str) -> str:
    types = {"src": "i64", "dst": "i64", "src_pages": "*i64", "first_tokens": "*i64", "dst_pages": "*i64"}
    types |= {"num_src_pages": "i32", "dst_stride": "i32"}
    constants: dict[str, Any] = {"NUM_PLANES": 64, "SRC_PAGE_SIZE": 16, "DST_PAGE_SIZE": 64, "SRC_CELLS": 1024}
    constants |= {"FIRST_CELL": 512, "CELLS": 512, "SRC_DTYPE": src_dtype, "DST_DTYPE": dst_dtype}
    for side, dtype in (("SRC", src_dtype), ("DST", dst_dtype)):
        constants |= {f"{side}_BITS": CELL_BITS[DTYPE_NBYTES[dtype]], f"{side}_ALIGNMENT": 16}
    return ptx(pack_pages_kernel, types, {"num_src_pages"}, constants | {"ROWS": 8, "COLUMNS": 512}, 4)


def unpack() -> str:
    types = {"copied": "*i64", "words": "*i64", "pages": "*i64", "page_words": "i32"}
    types |= {"part_words": "i32", "part_start": "i32"}
    return ptx(unpack_part_kernel, types, set(), {"FIRST": 128, "PART_ROW": 128, "ROW": 256, "TILE": 2048}, 4)


def main() -> None:
    kernels = {"mover, large pages": mover(rows=1), "mover, small pages": mover(rows=8), "digest": digest()}
    kernels |= {"pack, same dtype": pack("bfloat16", "bfloat16"), "pack, to FP8": pack("bfloat16", "fp8_e4m3")}
    kernels |= {"pack, from FP8": pack("fp8_e4m3", "bfloat16"), "pack, from float32": pack("float32", "bfloat16")}
    print(json.dumps(kernels | {"unpack": unpack()}))


if __name__ == "__main__":
    main()
