from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from diptych.kernels import page_pack
from diptych.kernels.gpu.pages.pack_pages import pack_constants, pack_pages
from diptych.kernels.page_pack import CELLS, PagePack

NUM_PAGES = 7
LOWER_HALVES = np.array([0, 0x8000, 0x7FFF, 0x8001, 0x1234], np.uint32)  # of float32: ties, and what is beside them
PACK = PagePack(
    num_layers=3,
    head_dim=16,
    src_page_size=4,
    src_num_heads=4,
    src_dtype="bfloat16",
    first_head=0,
    num_heads=4,
    dst_page_size=4,
    dst_dtype="bfloat16",
)


def random_pool(pack: PagePack) -> Any:
    """Every bit pattern is a number: infinities and NaNs, too."""
    nbytes = NUM_PAGES * pack.src_stride
    return np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8).reshape(NUM_PAGES, -1)


def packed(
    pack: PagePack,
    pool: Any,
    pages: list[int],
    first_tokens: list[int],
    device: torch.device,
    rows: tuple[int, int] | None = None,
) -> Any:
    """Images packed by the kernel, one behind the other; what is before and behind them stays as it is."""
    _, num_rows = rows or (0, pack.num_rows)
    nbytes = len(first_tokens) * num_rows * pack.row_nbytes
    out = torch.full((nbytes + 256,), 77, dtype=torch.uint8, device=device)
    source = torch.from_numpy(pool).to(device)
    some, firsts = (torch.tensor(numbers, device=device) for numbers in (pages, first_tokens))
    pack_pages(pack, source.data_ptr(), out.data_ptr() + 128, some, firsts, rows=rows, num_programs=3)
    assert (out[:128] == 77).all()
    assert (out[nbytes + 128 :] == 77).all()
    return out[128 : nbytes + 128].view(len(first_tokens), -1).cpu().numpy()


def assert_equal_but_for_nans(found: Any, expected: Any, dtype: str) -> None:
    """The bits of a NaN are not what a cast promises."""
    found, expected = (page_pack.widen(each.reshape(-1).view(CELLS[dtype]), dtype) for each in (found, expected))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({}, id="same"),
        pytest.param({"dst_page_size": 16}, id="larger pages"),
        pytest.param({"dst_page_size": 2, "first_head": 2, "num_heads": 2}, id="smaller pages, half of the heads"),
        pytest.param({"dst_page_size": 3, "first_head": 1, "num_heads": 1}, id="pages that are no multiple, one head"),
        pytest.param({"head_dim": 48, "num_heads": 3, "num_layers": 1}, id="odd sizes"),
        pytest.param({"num_planes": 1, "src_offset": 64, "src_page_nbytes": 4096}, id="one region of a page"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8_e4m3"])
def test_images_are_those_of_the_reference(changed: dict[str, int], dtype: str, device: torch.device) -> None:
    pack = replace(PACK, src_dtype=dtype, dst_dtype=dtype, **changed)
    pool, pages, first_tokens = random_pool(pack), [6, 0, 3, 2], [0, 9, 5, 15, 16]
    expected = np.stack([page_pack.pack_page(pack, pool, np.array(pages), first) for first in first_tokens])
    np.testing.assert_array_equal(packed(pack, pool, pages, first_tokens, device), expected)


@pytest.mark.parametrize("rows", [(0, 5), (7, 11), (23, 1)])
def test_some_rows_of_images_are_packed(rows: tuple[int, int], device: torch.device) -> None:
    pack = replace(PACK, dst_dtype="float32", dst_page_size=8, num_layers=2)
    pool, pages, first_tokens = random_pool(pack), [6, 0, 3, 2], [0, 9]
    images = [page_pack.pack_page(pack, pool, np.array(pages), first) for first in first_tokens]
    first, end = rows[0] * pack.row_nbytes, sum(rows) * pack.row_nbytes
    found = packed(pack, pool, pages, first_tokens, device, rows)
    assert_equal_but_for_nans(found, np.stack(images)[:, first:end].copy(), "float32")


def test_head_sizes_that_would_make_narrow_loads_are_refused() -> None:
    with pytest.raises(ValueError, match="heads of 40 numbers are not packed on GPUs: multiples of 16 are"):
        pack_constants("bfloat16", "bfloat16", 40)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy speaks of infinities and NaNs
@pytest.mark.parametrize("src_dtype", list(CELLS))
@pytest.mark.parametrize("dst_dtype", list(CELLS))
def test_every_dtype_is_cast_to_every_other_as_the_reference_does(
    src_dtype: str, dst_dtype: str, device: torch.device
) -> None:
    """Two-byte numbers: all of them; of float32 each of these as the upper half, over lower halves about the middle."""
    pack = replace(PACK, head_dim=32, src_page_size=16, dst_page_size=16, src_dtype=src_dtype, dst_dtype=dst_dtype)
    numbers = np.arange(NUM_PAGES * 3 * 2 * 16 * 4 * 32, dtype=np.uint32)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[np.dtype(CELLS[src_dtype]).itemsize]
    wide = numbers * np.uint32(1 << 16) + LOWER_HALVES[numbers % len(LOWER_HALVES)]
    pool = (wide if bits is np.uint32 else numbers).astype(bits).view(np.uint8).reshape(NUM_PAGES, -1)
    pages, first_tokens = list(range(NUM_PAGES)), [16 * page for page in range(NUM_PAGES)]
    expected = [page_pack.pack_page(pack, pool, np.array(pages), first) for first in first_tokens]
    assert_equal_but_for_nans(packed(pack, pool, pages, first_tokens, device), np.stack(expected), dst_dtype)


def test_parts_of_a_page_lie_one_after_the_other(device: torch.device) -> None:
    """Two heads a part: what two ranks write to one page."""
    pool = random_pool(PACK)
    source, landed = torch.from_numpy(pool).to(device), torch.zeros(1, 2 * PACK.image_nbytes // 2, dtype=torch.uint8)
    landed = landed.to(device)
    page, zero = torch.tensor([5], device=device), torch.tensor([0], device=device)
    for first_head in (0, 2):
        part = replace(PACK, first_head=first_head, num_heads=2)
        pack_pages(part, source.data_ptr(), landed.data_ptr() + first_head // 2 * part.image_nbytes, page, zero)
    whole = landed[0].cpu().numpy()
    page_pack.unpack_page(whole, [2, 2], num_rows=3 * 2 * 4, head_nbytes=32)
    np.testing.assert_array_equal(whole, pool[5])
