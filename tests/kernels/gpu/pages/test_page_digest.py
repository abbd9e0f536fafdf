from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.kernels.gpu.pages.page_digest import add_page_digest, as_digest, reference_page_digest
from diptych.kvtransfer.digest import add_digests, digest_bytes

NUM_PAGES = 12


def pool_and_pages(page_nbytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pool = torch.randint(0, 256, (NUM_PAGES, page_nbytes), dtype=torch.uint8, device=device)
    src, dst = (torch.randperm(NUM_PAGES, device=device)[:9] for _ in range(2))
    return pool, src, dst


def digest(
    pool: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor, window: tuple[int, int] | None = None
) -> int:
    total = torch.zeros(1, dtype=torch.int64, device=pool.device)
    add_page_digest(total, pool.data_ptr(), pages, pool.shape[1], offsets, window=window, num_programs=3)
    return as_digest(total)


@pytest.mark.parametrize("page_nbytes", [4096, 4096 + 8, 40_000])
@pytest.mark.parametrize("window", [None, (1024, 2048), (8, 4000)])
def test_it_equals_the_digest_of_host_pages_bit_for_bit(
    page_nbytes: int, window: tuple[int, int] | None, device: torch.device
) -> None:
    pool, src, dst = pool_and_pages(page_nbytes, device)
    first, nbytes = window or (0, page_nbytes)
    offsets = dst * page_nbytes + first
    parts = [
        digest_bytes(np.ascontiguousarray(pool[page, first : first + nbytes].cpu().numpy()), offset)
        for page, offset in zip(src.tolist(), offsets.tolist(), strict=True)
    ]
    assert digest(pool, src, offsets, window) == add_digests(*parts)
    assert reference_page_digest(pool, src, offsets, window) == add_digests(*parts)


def test_offsets_beyond_four_gibibytes_count_in_full(device: torch.device) -> None:
    pool, src, _ = pool_and_pages(4096, device)
    page = src[:1]
    far = torch.tensor([(1 << 40) + 8], dtype=torch.int64, device=device)
    assert digest(pool, page, far) == digest_bytes(pool[page[0]].cpu().numpy(), (1 << 40) + 8)


def test_layer_groups_and_batches_add_up_to_the_digest_of_the_whole(device: torch.device) -> None:
    pool, src, dst = pool_and_pages(4096, device)
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for some in (slice(5, 9), slice(0, 5)):
        for first in (2048, 0):
            offsets = dst[some] * 4096 + first
            add_page_digest(total, pool.data_ptr(), src[some], 4096, offsets, window=(first, 2048), num_programs=3)
    assert as_digest(total) == digest(pool, src, dst * 4096)


def test_a_changed_byte_and_a_wrong_place_change_it(device: torch.device) -> None:
    pool, src, dst = pool_and_pages(4096, device)
    right = digest(pool, src, dst * 4096)
    assert digest(pool, src, dst.roll(1) * 4096) != right
    for byte in (0, 1234, 4095):
        pool[src[3], byte] ^= 1
        assert digest(pool, src, dst * 4096) != right
        pool[src[3], byte] ^= 1
    assert digest(pool, src, dst * 4096) == right
