"""The best tokens of each row of scores on a GPU, exactly: where they lie in the pool, in the order of their positions.

Of equal scores the first positions win, so that a choice is one of the scores alone. `torch.topk` promises no order
among equals, reads a row of a graph to its full width, whatever its length, and returns positions, in order of scores.

The smallest score that is kept is found byte by byte, from the highest on: each pass counts how many of what is still
in question has which byte. A row is read five times, from the L2 cache after the first. One program a row.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.attention.index_scores import IndexRows
from diptych.kernels.gpu.grid import cdiv

CHUNK: Final = 4096  # scores at a time
NUM_WARPS: Final = 16
BYTES: Final = tl.constexpr(256)  # values of one


def choose_tokens(scores: Tensor, rows: IndexRows, chosen: Tensor, *, page_size: int) -> None:
    """Write the slots of the tokens that each row attends to to `chosen`, int32 `[num_rows, num_kept]`.

    A slot is page * page_size + offset. A row that sees no more than `num_kept` tokens attends to all, and its scores
    are not read; what is behind them in `chosen` stays. `scores` as in `index_scores`. Runs on the current stream and
    may be captured: a replay reads the lengths of its own time.
    """
    assert scores.dtype == torch.float32, scores.dtype
    assert chosen.dtype == torch.int32, chosen.dtype
    assert scores.stride(0) % 4 == 0, scores.stride()
    assert (scores.stride(1), chosen.stride(1)) == (1, 1), (scores.stride(), chosen.stride())
    assert len(rows.requests) == len(rows.lens) == len(chosen) <= len(scores), (scores.shape, chosen.shape)
    with torch.cuda.device_of(scores):
        choose_tokens_kernel[(len(chosen),)](
            scores,
            rows.page_table,
            rows.requests,
            rows.lens,
            chosen,
            scores.stride(0),
            rows.page_table.stride(0),
            chosen.stride(0),
            NUM_KEPT=chosen.shape[1],
            PAGE_SIZE=page_size,
            CHUNK=CHUNK,
            num_warps=NUM_WARPS,
        )


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table", "requests", "lens"],
)
def choose_tokens_kernel(
    scores,
    page_table,
    requests,
    lens,
    chosen,
    scores_stride,
    table_stride,
    chosen_stride,
    NUM_KEPT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    num_seen = tl.load(lens + row)
    pages = page_table + tl.load(requests + row).to(tl.int64) * table_stride
    own_scores, own = scores + row.to(tl.int64) * scores_stride, chosen + row.to(tl.int64) * chosen_stride
    smallest, num_equal = tl.zeros((), tl.uint32), tl.zeros((), tl.int32)  # all are kept
    is_choice = num_seen > NUM_KEPT
    if is_choice:
        smallest, num_equal = smallest_kept(own_scores, num_seen, NUM_KEPT, CHUNK)
    num_kept, num_met = tl.zeros((), tl.int32), tl.zeros((), tl.int32)  # kept so far; equal to the smallest so far
    start = tl.zeros((), tl.int32)
    while start < num_seen:
        token = tl.multiple_of(start, CHUNK) + tl.arange(0, CHUNK)
        exists = token < num_seen
        numbers = load_ordered(own_scores, token, tl.where(is_choice, num_seen, 0))
        is_equal = (exists & is_choice & (numbers == smallest)).to(tl.int32)
        place = num_met + tl.cumsum(is_equal)
        is_kept = (is_equal > 0) & (place <= num_equal) | (numbers > smallest)
        is_kept = (exists & (is_kept | (num_seen <= NUM_KEPT))).to(tl.int32)
        target = num_kept + tl.cumsum(is_kept) - 1
        page = tl.load(pages + token // PAGE_SIZE, mask=is_kept > 0, other=0)
        tl.store(own + target, page * PAGE_SIZE + token % PAGE_SIZE, mask=is_kept > 0)
        num_kept += tl.sum(is_kept)
        num_met += tl.sum(is_equal)
        start += CHUNK


@triton.jit
def smallest_kept(scores, count, NUM_KEPT: tl.constexpr, CHUNK: tl.constexpr):
    """Return the number of the smallest score that is kept, and how many that are equal to it are."""
    byte = tl.arange(0, BYTES)
    smallest = tl.zeros((), tl.uint32)  # of its bytes, those that are known
    num_left = tl.full((), NUM_KEPT, tl.int32)  # to be kept of what has these bytes
    shift = tl.full((), 24, tl.int32)
    while shift >= 0:
        counts = tl.zeros((BYTES,), tl.int32)
        start = tl.zeros((), tl.int32)
        while start < count:
            place = tl.multiple_of(start, CHUNK) + tl.arange(0, CHUNK)
            numbers = load_ordered(scores, place, count) >> shift.to(tl.uint32)
            is_in_question = (place < count) & ((numbers >> 8) == smallest)
            counts += tl.histogram((numbers & 255).to(tl.int32), BYTES, mask=is_in_question)
            start += CHUNK
        at_least = tl.cumsum(counts, reverse=True)
        found = tl.sum((at_least >= num_left).to(tl.int32)) - 1
        num_left -= tl.sum(tl.where(byte == found, at_least - counts, 0))
        smallest = smallest << 8 | found.to(tl.uint32)
        shift -= 8
    return smallest, num_left


@triton.jit
def load_ordered(scores, place, count):
    """Return unsigned numbers in the order of scores; both zeros are one. Up to the next four are read."""
    found = tl.load(scores + place, mask=place < tl.cdiv(count, 4) * 4, other=0.0)  # by fours, as they are aligned
    bits = tl.where(found == 0.0, 0.0, found).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


def reference_choose_tokens(scores: Tensor, rows: IndexRows, num_kept: int, page_size: int) -> list[Tensor]:
    """Return the slots of each row, int64."""
    found = []
    for own, request, num_seen in zip(scores, rows.requests.tolist(), rows.lens.tolist(), strict=True):
        best = own[:num_seen].argsort(descending=True, stable=True)[:num_kept].sort().values
        pages = rows.page_table[request, : cdiv(num_seen, page_size)].long()
        found.append(pages[best // page_size] * page_size + best % page_size)
    return found
