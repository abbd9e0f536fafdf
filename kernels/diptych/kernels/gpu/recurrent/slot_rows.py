"""How kernels have rows of one token or a few: what `SlotRows` says of them, and what is kept of rows.

A request has a token, or a row of several that follow each other; one program has all of a row, and the state between
its tokens. So a token of a row is computed by the same instructions, from the same numbers, as one that comes alone. A
row of tokens that may be wrong leaves the slot as it was; what it was given is kept, until those that came true are
given to the slot, as a row that it sees.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.slot_rows import SlotRows

PER_STEP: Final = ("slots", "lens")  # parts of what was staged for a step
TILE: Final = 1024  # numbers of a token that a program keeps


@triton.jit
def row_of(slots, lens, row):
    """Return the slot and the length of the row that begins at a token; 0 where there is nothing to do."""
    slot = tl.load(slots + row).to(tl.int64)
    return slot, tl.where(slot < 0, 0, tl.load(lens + row))


def keep_rows(projected: Tensor, rows: SlotRows, given: Tensor) -> None:
    """Keep what rows are given of which slots see nothing: `given`, `[num_slots, row_tokens, in_size]`.

    `projected` is `[num_tokens, in_size]`: rows come before prompts. Can be part of a CUDA graph.
    """
    num_rows, in_size = len(rows.slots), projected.shape[1]
    rows.check(num_rows)
    assert num_rows <= len(projected), (num_rows, projected.shape)
    assert given.shape[2] == in_size, (given.shape, projected.shape)
    assert (given.dtype, projected.stride(1)) == (projected.dtype, 1), (given.dtype, projected.stride())
    assert given.is_contiguous(), given.stride()
    with torch.cuda.device_of(projected):
        keep_rows_kernel[(num_rows, cdiv(in_size, TILE))](
            projected, *rows, given, projected.stride(0), ROW=given.shape[1] * in_size, SIZE=in_size, TILE=TILE
        )


@triton.jit(do_not_specialize_on_alignment=PER_STEP)
def keep_rows_kernel(projected, slots, lens, given, stride, ROW: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot, length = row_of(slots, lens, row)
    if length < 0:
        at = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = at < SIZE
        for i in range(-length):
            number = tl.load(projected + (row + i) * stride + at, mask=inside)
            tl.store(given + slot * ROW + i * SIZE + at, number, mask=inside)
