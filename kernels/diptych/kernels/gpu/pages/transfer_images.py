"""Compiles the kernels of the KV transfer engine ahead of time, for its thread to launch: no interpreter, no lock.

The engine passes the arguments by position, so their order in `page_mover.py`, `page_digest.py`, `pack_pages.py` and
`unpack_pages.py` is an interface; and it promises that pools, pages, windows and images are multiples of 128 bytes,
which is what makes the stores 16 bytes wide. Peers come and go while a worker runs, so what turns pages into theirs is
compiled for every type that a pool may have.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diptych.kernels.gpu.pages import pack_pages, page_digest, page_mover, unpack_pages
from diptych.kernels.gpu.pages.page_mover import tile_of
from diptych.kernels.image import KernelImage, PageShape, TransferKernels
from diptych.kernels.page_pack import HEAD_STEP

MOVER_PROGRAMS: Final = 64  # half of the multiprocessors of an H100: more is hardly faster, and takes from the model
DIGESTER_PROGRAMS: Final = 264
PACKER_PROGRAMS: Final = 264
UNPACKER_PROGRAMS: Final = 264
_DIVISIBLE: Final = [["tt.divisibility", 16]]
_COUNTS: Final = {"num_pages": "i32", "page_words": "i32", "num_words": "i32"}
_MOVER: Final = {"src": "i64", "dst": "i64", "src_pages": "*i64", "dst_pages": "*i64", **_COUNTS, "done": "*i32"}
_DIGESTER: Final = {"total": "*i64", "pool": "i64", "pages": "*i64", "offsets": "*i64", **_COUNTS}
_PACKER_COUNTS: Final = (
    *("num_images", "num_src_pages", "src_stride", "src_page_size", "src_cells", "first_cell"),
    *("dst_page_size", "row_chunks", "first_row", "num_rows"),
)
_PACKER: Final = {
    **{"src": "i64", "dst": "i64", "src_pages": "*i64", "first_tokens": "*i64"},
    **dict.fromkeys(_PACKER_COUNTS, "i32"),
}
_UNPACKER_COUNTS: Final = (
    *("num_pages", "region_words", "page_words"),
    *("num_rows", "row_chunks", "first_chunk", "part_chunks"),
)
_UNPACKER: Final = {"copied": "i64", "pool": "i64", "pages": "*i64", **dict.fromkeys(_UNPACKER_COUNTS, "i32")}


def transfer_kernels(ordinal: int, shape: PageShape) -> TransferKernels:
    """Compile for a CUDA device, and the pages of a pool on it."""
    return compile_for(torch.cuda.get_device_capability(ordinal), shape)


def compile_for(capability: tuple[int, int], shape: PageShape) -> TransferKernels:
    """The same for devices of a capability, whether there is one here or not.

    What can't convert pages of such heads is left out: the pool exchanges pages with equal ones all the same.
    """
    mover = _compile(
        page_mover.move_pages_kernel,
        _MOVER,
        ("src", "dst", "page_words", "num_words"),
        tile_of(page_mover.TILE_WORDS, shape.window_nbytes),
        capability,
        num_warps=page_mover.NUM_WARPS,
        num_programs=MOVER_PROGRAMS,
    )
    digester = _compile(
        page_digest.page_digest_kernel,
        _DIGESTER,
        ("pool", "page_words", "num_words"),
        tile_of(page_digest.TILE_WORDS, shape.window_nbytes) | page_digest.KEYS,
        capability,
        num_warps=4,
        num_programs=DIGESTER_PROGRAMS,
    )
    if shape.head_dim % HEAD_STEP:
        return TransferKernels(mover, digester)
    pairs = product(shape.dtypes, pack_pages.DTYPE_NBYTES)
    packers = {(src, dst): _packer(src, dst, shape, capability) for src, dst in pairs}
    return TransferKernels(mover, digester, packers, _unpacker(shape, capability))


def _packer(src_dtype: str, dst_dtype: str, shape: PageShape, capability: tuple[int, int]) -> KernelImage:
    return _compile(
        pack_pages.pack_pages_kernel,
        _PACKER,
        ("src", "dst", "src_stride", "src_cells", "first_cell"),
        pack_pages.pack_constants(src_dtype, dst_dtype, shape.head_dim),
        capability,
        num_warps=pack_pages.NUM_WARPS,
        num_programs=PACKER_PROGRAMS,
    )


def _unpacker(shape: PageShape, capability: tuple[int, int]) -> KernelImage:
    return _compile(
        unpack_pages.unpack_part_kernel,
        _UNPACKER,
        ("copied", "pool", "region_words", "page_words"),
        unpack_pages.unpack_constants(shape.head_nbytes),
        capability,
        num_warps=unpack_pages.NUM_WARPS,
        num_programs=UNPACKER_PROGRAMS,
    )


def _compile(
    kernel: Any,
    arguments: Mapping[str, str],
    divisible: tuple[str, ...],
    constants: Mapping[str, Any],
    capability: tuple[int, int],
    *,
    num_warps: int,
    num_programs: int,
) -> KernelImage:
    assert list(kernel.arg_names) == [*arguments, *constants], kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={**arguments, **dict.fromkeys(constants, "constexpr")},
        constexprs=dict(constants),
        attrs={(list(arguments).index(name),): _DIVISIBLE for name in divisible},
    )
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    metadata = compiled.metadata
    chunk = int(constants.get("CHUNK", 0))
    return KernelImage(compiled.asm["cubin"], metadata.name, num_warps, metadata.shared, num_programs, chunk)
