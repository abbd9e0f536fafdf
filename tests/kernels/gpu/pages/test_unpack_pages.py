from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.kernels import page_pack
from diptych.kernels.gpu.pages.unpack_pages import unpack_constants, unpack_pages

NUM_PAGES, NUM_LAYERS, PAGE_SIZE = 9, 3, 5


@pytest.mark.parametrize("part_heads", [[4], [2, 2], [1, 1, 1, 1], [1, 2]])
@pytest.mark.parametrize("head_nbytes", [128, 48, 16])
@pytest.mark.parametrize("scratch_pages", [1, 2, 8])
def test_parts_become_pages_as_in_the_reference_and_other_pages_stay(
    part_heads: list[int], head_nbytes: int, scratch_pages: int, device: torch.device
) -> None:
    page_nbytes = NUM_LAYERS * 2 * PAGE_SIZE * sum(part_heads) * head_nbytes
    landed = np.random.default_rng(0).integers(0, 256, (NUM_PAGES, page_nbytes), dtype=np.uint8)
    pool, pages = torch.from_numpy(landed.copy()).to(device), [7, 0, 3, 8, 4]
    shape = {"num_rows": NUM_LAYERS * 2 * PAGE_SIZE, "head_nbytes": head_nbytes}
    scratch = torch.empty(scratch_pages * page_nbytes, dtype=torch.uint8, device=device)
    unpack_pages(pool, torch.tensor(pages, device=device), part_heads, scratch, num_programs=3, **shape)
    for page in pages:
        page_pack.unpack_page(landed[page], part_heads, **shape)
    np.testing.assert_array_equal(pool.cpu().numpy(), landed)


def test_one_region_of_pages_is_unpacked_and_the_others_stay(device: torch.device) -> None:
    landed = np.random.default_rng(1).integers(0, 256, (NUM_PAGES, 16 + NUM_LAYERS * PAGE_SIZE * 64), dtype=np.uint8)
    pool, pages = torch.from_numpy(landed.copy()).to(device), [7, 0, 3]
    shape = {"num_rows": NUM_LAYERS * PAGE_SIZE, "head_nbytes": 16}
    scratch = torch.empty(2 * landed.shape[1], dtype=torch.uint8, device=device)
    unpack_pages(pool[:, 16:], torch.tensor(pages, device=device), [2, 2], scratch, **shape)
    for page in pages:
        page_pack.unpack_page(landed[page, 16:], [2, 2], **shape)
    np.testing.assert_array_equal(pool.cpu().numpy(), landed)


def test_scratch_of_less_than_a_page_is_refused(device: torch.device) -> None:
    pool, page = torch.zeros(1, 64, dtype=torch.uint8, device=device), torch.tensor([0], device=device)
    scratch = torch.empty(56, dtype=torch.uint8, device=device)
    with pytest.raises(AssertionError, match="less than a page"):
        unpack_pages(pool, page, [1, 1], scratch, num_rows=2, head_nbytes=16)


def test_heads_that_would_make_narrow_loads_are_refused() -> None:
    with pytest.raises(ValueError, match="heads of 24 bytes are not put together on GPUs: multiples of 16 are"):
        unpack_constants(24)
