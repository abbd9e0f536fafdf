from __future__ import annotations

import pytest
import torch

from diptych.kernels.page_unpack import reference_unpack_pages, unpack_pages

NUM_PAGES = 9


@pytest.mark.parametrize("nbytes", [1, 2, 4])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("scratch_pages", [1, 2, 8])
def test_parts_become_one_page_and_other_pages_stay(
    nbytes: int, num_parts: int, scratch_pages: int, device: torch.device
) -> None:
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32}[nbytes]
    pool = torch.randint(-100, 100, (NUM_PAGES, 3, 2, 5, 4, 16), dtype=dtype, device=device)
    expected, pages = pool.clone(), torch.randperm(NUM_PAGES, device=device)[:5]
    scratch = torch.empty(scratch_pages * pool[0].nbytes, dtype=torch.uint8, device=device)
    unpack_pages(pool, pages, num_parts, scratch)
    reference_unpack_pages(expected, pages, num_parts)
    assert torch.equal(pool, expected)


def test_the_heads_of_each_rank_are_where_attention_looks_for_them(device: torch.device) -> None:
    whole = torch.randn(1, 3, 2, 4, 4, 8, device=device)
    packed = torch.cat([whole[..., :2, :].reshape(-1), whole[..., 2:, :].reshape(-1)]).view(whole.shape)
    unpack_pages(
        packed, torch.zeros(1, dtype=torch.int64, device=device), 2, torch.empty_like(whole).view(torch.uint8).view(-1)
    )
    assert torch.equal(packed, whole)


def test_scratch_of_less_than_a_page_is_refused(device: torch.device) -> None:
    pool = torch.zeros(1, 1, 2, 4, 4, 8, device=device)
    page = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(AssertionError, match="less than a page"):
        unpack_pages(pool, page, 2, torch.empty(pool.nbytes - 8, dtype=torch.uint8, device=device))
