"""Compiles the kernels of the KV transfer engine ahead of time, for its thread to launch: no interpreter, no lock.

The engine passes the arguments by position, so their order in `page_mover.py` and `page_digest.py` is an interface; and
it promises that pools, pages and windows are multiples of 128 bytes, which is what makes the stores 16 bytes wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diptych.kernels.gpu.pages import page_digest, page_mover
from diptych.kernels.gpu.pages.page_mover import tile_of
from diptych.kernels.image import KernelImage, TransferKernels

MOVER_PROGRAMS: Final = 64  # half of the multiprocessors of an H100: more is hardly faster, and takes from the model
DIGESTER_PROGRAMS: Final = 264
_DIVISIBLE: Final = [["tt.divisibility", 16]]
_COUNTS: Final = {"num_pages": "i32", "page_words": "i32", "num_words": "i32"}
_MOVER: Final = {"src": "i64", "dst": "i64", "src_pages": "*i64", "dst_pages": "*i64", **_COUNTS, "done": "*i32"}
_DIGESTER: Final = {"total": "*i64", "pool": "i64", "pages": "*i64", "offsets": "*i64", **_COUNTS}


def transfer_kernels(ordinal: int, window_nbytes: int) -> TransferKernels:
    """Compile for a CUDA device. `window_nbytes`: the smallest part of a page that is moved, a layer."""
    return compile_for(torch.cuda.get_device_capability(ordinal), window_nbytes)


def compile_for(capability: tuple[int, int], window_nbytes: int) -> TransferKernels:
    """The same for devices of a capability, whether there is one here or not."""
    mover = _compile(
        page_mover.move_pages_kernel,
        _MOVER,
        ("src", "dst", "page_words", "num_words"),
        tile_of(page_mover.TILE_WORDS, window_nbytes),
        capability,
        num_warps=page_mover.NUM_WARPS,
        num_programs=MOVER_PROGRAMS,
    )
    digester = _compile(
        page_digest.page_digest_kernel,
        _DIGESTER,
        ("pool", "page_words", "num_words"),
        tile_of(page_digest.TILE_WORDS, window_nbytes) | page_digest.KEYS,
        capability,
        num_warps=4,
        num_programs=DIGESTER_PROGRAMS,
    )
    return TransferKernels(mover, digester)


def _compile(
    kernel: Any,
    arguments: Mapping[str, str],
    divisible: tuple[str, ...],
    constants: Mapping[str, int],
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
    return KernelImage(compiled.asm["cubin"], metadata.name, num_warps, metadata.shared, num_programs)
