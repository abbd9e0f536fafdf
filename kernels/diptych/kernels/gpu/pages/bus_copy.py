"""Copies a few bytes between a GPU and pinned host memory by a kernel, past copy engines that are busy.

A copy engine does one copy after the other in each direction, whatever streams they come from: 100 KiB that a step
needs wait for the GiB of pages in front of them, 20 ms. A kernel reads and writes host memory by itself.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_NBYTES: Final = 4
TILE_WORDS: Final = 2048
MOST_PROGRAMS: Final = 16
NUM_WARPS: Final = 4


def bus_copy(to: Tensor, source: Tensor, device: torch.device) -> None:
    """Copy `source` to `to`: contiguous, of one length of whole words of 4 bytes, aligned to 16, either of them pinned.

    Queued on the current stream of `device`. Both have to be kept until it has run: torch doesn't know that a kernel
    uses pinned memory.
    """
    assert to.is_contiguous(), to.stride()
    assert source.is_contiguous(), source.stride()
    assert to.nbytes == source.nbytes, (to.shape, to.dtype, source.shape, source.dtype)
    assert to.nbytes % WORD_NBYTES == 0, to.nbytes
    num_words = to.nbytes // WORD_NBYTES
    if not num_words:
        return
    num_programs = min(MOST_PROGRAMS, triton.cdiv(num_words, TILE_WORDS))
    with torch.cuda.device(device) if device.type == "cuda" else torch.device(device):
        bus_copy_kernel[(num_programs,)](
            source.data_ptr(), to.data_ptr(), num_words, TILE=TILE_WORDS, num_warps=NUM_WARPS
        )


@triton.jit(do_not_specialize=["num_words"])
def bus_copy_kernel(source, to, num_words, TILE: tl.constexpr):
    source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    to_words = tl.multiple_of(to.to(tl.pointer_type(tl.int32)), 16)
    first = tl.program_id(0) * TILE
    while first < num_words:
        word = first + tl.arange(0, TILE)
        tl.store(to_words + word, tl.load(source_words + word, mask=word < num_words), mask=word < num_words)
        first += tl.num_programs(0) * TILE
