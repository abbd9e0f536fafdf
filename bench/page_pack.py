"""How fast pages are packed for a pool with another layout, and unpacked: GB/s beside memcpy of as many bytes.

Shape: 8B models (32 layers, 8 KV heads of 128). One thread, as in the transfer engine; pages scattered in a pool that
is larger than the caches. GB/s of the larger of what is read and what is written.

    python bench/page_pack.py [--quick] [--json]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from ctypes import byref
from typing import Any, Final

import numpy as np
from report import Report, arguments

from diptych.kernels.cpu.library import load
from diptych.kernels.page_pack import CELLS, PagePack, SourceStruct, pack_struct, parts_struct

NUM_LAYERS, HEADS, DIM = 32, 8, 128
BUFFER_NBYTES: Final = 256 << 20
U8 = np.ndarray[Any, np.dtype[np.uint8]]

CASES: Final = {  # page size, heads of a page, dtype at the source; heads taken; page size, dtype at the target
    "pages 16 to 64": (16, 8, "bfloat16", 8, 64, "bfloat16"),
    "pages 64 to 16": (64, 8, "bfloat16", 8, 16, "bfloat16"),
    "ranks 1 to 2": (16, 8, "bfloat16", 4, 16, "bfloat16"),
    "ranks 1 to 8": (16, 8, "bfloat16", 1, 16, "bfloat16"),
    "ranks 2 to 1": (16, 4, "bfloat16", 4, 16, "bfloat16"),
    "bfloat16 to fp8": (16, 8, "bfloat16", 8, 16, "fp8_e4m3"),
    "float32 to fp8": (16, 8, "float32", 8, 16, "fp8_e4m3"),
    "float32 to bfloat16": (16, 8, "float32", 8, 16, "bfloat16"),
    "fp8 to bfloat16": (16, 8, "fp8_e4m3", 8, 16, "bfloat16"),
}


def main() -> int:
    options = arguments(__doc__).parse_args()
    rounds = 3 if options.quick else 7
    source = np.random.default_rng(0).integers(0, 120, BUFFER_NBYTES, dtype=np.uint8)
    target = np.zeros(BUFFER_NBYTES, np.uint8)
    with Report(as_json=options.json) as report:
        for name, case in CASES.items():
            measure_pack(report, name, pack_of(*case), source, target, rounds)
        for parts in (2, 8):
            measure_unpack(report, parts, target, rounds)
    return 0


def pack_of(src_page: int, src_heads: int, src: str, heads: int, dst_page: int, dst: str) -> PagePack:
    return PagePack(NUM_LAYERS, DIM, src_page, src_heads, src, 0, heads, dst_page, dst)


def measure_pack(report: Report, name: str, pack: PagePack, source: U8, target: U8, rounds: int) -> None:
    token_nbytes = NUM_LAYERS * 2 * pack.src_num_heads * DIM * np.dtype(CELLS[pack.src_dtype]).itemsize
    num_pages = min(len(source) // (token_nbytes * pack.src_page_size), 256)
    num_images = min(num_pages * pack.src_page_size // pack.dst_page_size, len(target) // pack.image_nbytes)
    pages = np.random.default_rng(1).permutation(num_pages)
    struct, where = pack_struct(pack), SourceStruct(source.ctypes.data, pages.ctypes.data, num_pages)
    num_rows = 2 * NUM_LAYERS * pack.dst_page_size

    def run() -> None:
        for image in range(num_images):
            out = target.ctypes.data + image * pack.image_nbytes
            load().diptych_pack_rows(byref(struct), byref(where), image * pack.dst_page_size, 0, num_rows, out)

    taken = num_images * pack.dst_page_size * token_nbytes * pack.num_heads // pack.src_num_heads
    nbytes = max(taken, num_images * pack.image_nbytes)
    show(report, f"pack/{name}", nbytes, run, rounds, source, target)


def measure_unpack(report: Report, num_parts: int, pages: U8, rounds: int) -> None:
    page_size = 16
    page_nbytes = NUM_LAYERS * 2 * page_size * HEADS * DIM * 2
    num_pages, scratch = len(pages) // page_nbytes, np.empty(page_nbytes, np.uint8)
    parts = parts_struct([HEADS // num_parts] * num_parts, num_rows=NUM_LAYERS * 2 * page_size, head_nbytes=DIM * 2)

    def run() -> None:
        for page in range(num_pages):
            load().diptych_unpack_page(byref(parts), pages.ctypes.data + page * page_nbytes, scratch.ctypes.data)

    show(report, f"unpack/{num_parts} parts", num_pages * page_nbytes, run, rounds, pages.copy(), pages)


def show(report: Report, case: str, nbytes: int, run: Callable[[], None], rounds: int, source: U8, target: U8) -> None:
    """Both in turns, so that both see the same machine."""

    def copy() -> None:
        target[:nbytes] = source[:nbytes]

    times = [(elapsed_s(run), elapsed_s(copy)) for _ in range(rounds)]
    ours, limit = (nbytes / min(each) / 1e9 for each in zip(*times, strict=True))
    report.row("page_pack", case, ours, "GB/s", limit, "memcpy, same run", ours / limit)


def elapsed_s(run: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    sys.exit(main())
