"""Steps with new tokens for tests of extend attention: random keys and values on random pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

ON_GPU: Final = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
DTYPES: Final = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=ON_GPU)]
FP8: Final = torch.float8_e4m3fn

Step = dict[str, Any]


def step(
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    device: torch.device,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    first_page: int = 0,
) -> Step:
    """A step on pages in random order, in one layer of two; whatever is no token of it is NaN."""
    lens = [prefix + extend for prefix, extend in zip(prefix_lens, extend_lens, strict=True)]
    counts = [-(-length // page_size) for length in lens]
    order = torch.split_with_sizes(first_page + torch.randperm(sum(counts) + 2), [*counts, 2])
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    shape = (first_page + sum(counts) + 2, 2, 2, page_size, heads[1], head_dim)
    pool = torch.full(shape, torch.nan, dtype=torch.float32 if kv_dtype == FP8 else kv_dtype or dtype, device=device)
    for row, (length, pages) in enumerate(zip(lens, order, strict=False)):
        table[row, : len(pages)] = pages
        slots = torch.arange(length)
        new_kv = torch.randn(length, 2, heads[1], head_dim, device=device).to(pool.dtype)
        pool[pages[slots // page_size].long().to(device), 1, :, (slots % page_size).to(device)] = new_kv
    starts = torch.tensor([0, *extend_lens]).cumsum(0).int()
    return {
        "q": torch.randn(int(starts[-1]), heads[0] + 1, head_dim, device=device).to(dtype)[:, 1:],  # a part of `qkv`
        "kv_layer": pool.to(kv_dtype or dtype)[:, 1],
        "page_table": table.to(device),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "extend_starts": starts.to(device),
    }


def forget_unseen(step: Step, window: int, *, chunked: bool) -> None:
    """Put NaN where tokens are that no window of a new token sees: their pages may be others' by then."""
    page_size, extend_lens = step["kv_layer"].shape[2], step["extend_starts"].diff().tolist()
    for pages, length, extend_len in zip(step["page_table"], step["seq_lens"].tolist(), extend_lens, strict=True):
        begin = length - extend_len
        slots = torch.arange((begin // window * window if chunked else max(0, begin + 1 - window)) if window else 0)
        step["kv_layer"][pages[slots // page_size].long(), :, slots % page_size] = torch.nan
