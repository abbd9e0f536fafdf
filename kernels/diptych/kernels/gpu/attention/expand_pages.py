"""Copies the pages of FP8 of a step's requests into a pool of 16 bits, in their order: what `prompt_attention` reads.

A number of float8 (e4m3fn) is the same in 16 bits, so nothing is rounded; scales stay with whoever reads. Each page of
the new pool has the keys of one turn of a tile. Places behind the end of a request are zeros.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import power_of_two

TOKENS: Final = 8  # of a program


def expanded_table(seq_lens: npt.NDArray[np.int64], page_size: int) -> npt.NDArray[np.int32]:
    """Return `[batch_size, max_pages]`: pages of the new pool one after the other, request by request."""
    counts = -(-seq_lens // page_size)
    firsts = np.cumsum(counts) - counts
    return (firsts[:, None] + np.arange(max(1, counts.max(initial=0)))).astype(np.int32)


def expand_pages(kv_layer: Tensor, page_table: Tensor, seq_lens: Tensor, pool: Tensor, new_table: Tensor) -> None:
    """Fill `pool` `[num_pages, 2, page_size, num_kv_heads, head_dim]`, contiguous, where `new_table` says.

    The others: see `extend_attention`. Runs on the current stream, and can be part of a CUDA graph.
    """
    page_size, num_kv_heads, head_dim = pool.shape[2:]
    assert kv_layer.stride()[3:] == (head_dim, 1), kv_layer.stride()
    assert pool.is_contiguous(), pool.stride()
    assert page_size % TOKENS == 0, page_size
    batch, max_pages = new_table.shape
    with torch.cuda.device_of(pool):
        expand_pages_kernel[(max_pages * (page_size // TOKENS), batch, 2)](
            pool,
            kv_layer,
            page_table,
            new_table,
            seq_lens,
            page_table.stride(0),
            new_table.stride(0),
            WIDTH=num_kv_heads * head_dim,
            COLUMNS=power_of_two(num_kv_heads * head_dim),
            PAGE_SIZE=kv_layer.shape[2],
            PAGE_STRIDE=kv_layer.stride(0),
            VALUE_STRIDE=kv_layer.stride(1),
            SLOT_STRIDE=kv_layer.stride(2),
            NEW_PAGE_SIZE=page_size,
            TOKENS=TOKENS,
        )


@triton.jit(
    do_not_specialize=["table_stride", "new_table_stride"],
    do_not_specialize_on_alignment=["page_table", "new_table", "seq_lens"],
)
def expand_pages_kernel(
    pool,
    kv,
    page_table,
    new_table,
    seq_lens,
    table_stride,
    new_table_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH as a power of two
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    NEW_PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    request, plane = tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + request)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < tl.cdiv(seq_len, NEW_PAGE_SIZE) * NEW_PAGE_SIZE:
        columns = tl.arange(0, COLUMNS)
        inside = (tokens < seq_len)[:, None] & (columns < WIDTH)[None, :]
        pages = tl.load(page_table + request * table_stride + tokens // PAGE_SIZE, mask=tokens < seq_len, other=0)
        rows = kv + pages.to(tl.int64) * PAGE_STRIDE + plane * VALUE_STRIDE + tokens % PAGE_SIZE * SLOT_STRIDE
        stored = tl.load(rows[:, None] + columns[None, :], mask=inside, other=0.0)
        new_page = tl.load(new_table + request * new_table_stride + tl.program_id(0) * TOKENS // NEW_PAGE_SIZE)
        new_rows = (new_page.to(tl.int64) * 2 + plane) * NEW_PAGE_SIZE + tokens % NEW_PAGE_SIZE
        new = pool + new_rows[:, None] * WIDTH + columns[None, :]
        tl.store(new, stored.to(pool.dtype.element_ty), mask=(columns < WIDTH)[None, :])
