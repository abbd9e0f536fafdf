from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.kernels.gpu.attention.expand_pages import expand_pages, expanded_table

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("num_kv_heads", [2, 3])
def test_pages_are_in_order_and_what_is_behind_a_request_is_zero(num_kv_heads: int, device: torch.device) -> None:
    torch.manual_seed(0)
    lens = np.array([37, 1, 0, 64])
    stored = torch.randn(12, 2, 2, 16, num_kv_heads, 64, device=device).to(FP8)[:, 1]
    page_table = torch.randperm(12)[: 4 * 3].view(4, 3).int()
    page_table = torch.cat([page_table, page_table[:, :1]], dim=1).to(device)
    new_table = torch.from_numpy(expanded_table(lens, 32)).to(device)
    pool = torch.full((5, 2, 32, num_kv_heads, 64), torch.nan, dtype=torch.float16, device=device)

    expand_pages(stored, page_table, torch.from_numpy(lens).int().to(device), pool, new_table)

    for request, (first, count) in enumerate([(0, 2), (2, 1), (3, 0), (3, 2)]):
        pages = stored.to(torch.float16)[page_table[request].long()].transpose(1, 2).flatten(0, 1)[: lens[request]]
        expected = torch.zeros(count * 32, 2, num_kv_heads, 64, dtype=torch.float16, device=device)
        expected[: len(pages)] = pages
        found = pool[first : first + count].transpose(1, 2).flatten(0, 1)
        assert torch.equal(found, expected)
