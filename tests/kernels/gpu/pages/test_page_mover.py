from __future__ import annotations

import pytest
import torch
from two_gpus import needs_two_gpus

from diptych.kernels.gpu.pages.page_mover import move_pages, reference_move_pages

NUM_PAGES = 12


def pools(page_nbytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    src, dst = (torch.randint(0, 256, (NUM_PAGES, page_nbytes), dtype=torch.uint8, device=device) for _ in range(2))
    return src, dst


def some_pages(count: int, device: torch.device) -> torch.Tensor:
    return torch.randperm(NUM_PAGES, device=device)[:count]


@pytest.mark.parametrize("page_nbytes", [4096, 4096 + 8, 40_000, 65_536])
@pytest.mark.parametrize("window", [None, (1024, 2048), (8, 4000)])
def test_pages_land_where_they_were_sent_and_nowhere_else(
    page_nbytes: int, window: tuple[int, int] | None, device: torch.device
) -> None:
    src, dst = pools(page_nbytes, device)
    expected = dst.clone()
    src_pages, dst_pages = some_pages(9, device), some_pages(9, device)
    done = torch.zeros(1, dtype=torch.int32, device=device)
    move_pages(src.data_ptr(), dst.data_ptr(), src_pages, dst_pages, page_nbytes, done, window=window, num_programs=3)
    reference_move_pages(src, expected, src_pages, dst_pages, window)
    assert torch.equal(dst, expected)
    assert done.item() == 3


def test_layer_groups_together_move_the_whole_page(device: torch.device) -> None:
    src, dst = pools(8192, device)
    pages, done = some_pages(NUM_PAGES, device), torch.zeros(1, dtype=torch.int32, device=device)
    for first in range(0, 8192, 2048):
        move_pages(src.data_ptr(), dst.data_ptr(), pages, pages, 8192, done, window=(first, 2048), num_programs=1)
    assert torch.equal(dst, src)
    assert done.item() == 4


def test_more_programs_than_work_do_no_harm(device: torch.device) -> None:
    src, dst = pools(4096, device)
    page, done = some_pages(1, device), torch.zeros(1, dtype=torch.int32, device=device)
    expected = dst.clone()
    expected[page] = src[page]
    move_pages(src.data_ptr(), dst.data_ptr(), page, page, 4096, done, num_programs=16)
    assert torch.equal(dst, expected)
    assert done.item() == 16


def test_what_is_not_whole_words_is_refused(device: torch.device) -> None:
    src, dst = pools(4096, device)
    page, done = some_pages(1, device), torch.zeros(1, dtype=torch.int32, device=device)
    for page_nbytes, window in ((4092, None), (4096, (4, 8)), (4096, (0, 12)), (4096, (4088, 16))):
        with pytest.raises(AssertionError):
            move_pages(src.data_ptr(), dst.data_ptr(), page, page, page_nbytes, done, window=window)


@pytest.mark.gpu
@needs_two_gpus
def test_pages_reach_the_peer_gpu() -> None:
    torch.manual_seed(0)
    here, there = torch.device("cuda:0"), torch.device("cuda:1")
    src, dst = pools(2 << 20, here)[0], pools(2 << 20, there)[1]
    assert torch.cuda.can_device_access_peer(0, 1)
    dst.copy_(src.flip(0))  # torch opens the peer's memory with its first copy
    src_pages, dst_pages = some_pages(9, here), some_pages(9, here)
    expected, done = dst.clone(), torch.zeros(1, dtype=torch.int32, device=here)
    move_pages(src.data_ptr(), dst.data_ptr(), src_pages, dst_pages, 2 << 20, done)
    torch.cuda.synchronize(here)
    reference_move_pages(src.to(there), expected, src_pages.to(there), dst_pages.to(there))
    assert torch.equal(dst, expected)
