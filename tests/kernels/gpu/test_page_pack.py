from __future__ import annotations

import pytest
import torch

from diptych.kernels.page_pack import pack_pages, reference_pack_pages

NUM_LAYERS, HEAD_DIM = 3, 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def pool(
    num_pages: int, page_size: int, heads: int, dtype: torch.dtype, device: torch.device, scale: float = 100.0
) -> torch.Tensor:
    values = torch.randn(num_pages, NUM_LAYERS, 2, page_size, heads, HEAD_DIM, device=device) * scale
    return values.clamp(-448, 448).to(dtype)


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("page_size", "heads", "first_head", "skip_tokens", "num_tokens"),
    [
        pytest.param(4, 4, 0, 0, 20, id="same pages"),
        pytest.param(16, 4, 0, 0, 20, id="larger pages, the last one not full"),
        pytest.param(2, 2, 2, 3, 9, id="smaller pages, half of the heads, from within a page"),
        pytest.param(3, 1, 1, 1, 17, id="pages that are no multiple, one head"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_and_heads_land_in_the_targets_order(
    page_size: int,
    heads: int,
    first_head: int,
    skip_tokens: int,
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    src, dst = pool(7, 4, 4, dtype, device), pool(12, page_size, heads, dtype, device)
    expected = dst.clone()
    src_pages = torch.randperm(7, device=device)[:6]
    dst_pages = torch.randperm(12, device=device)[: -(-num_tokens // page_size)]
    for pack, target in ((pack_pages, dst), (reference_pack_pages, expected)):
        pack(src, target, src_pages, dst_pages, num_tokens, skip_tokens=skip_tokens, first_head=first_head)
    assert equal_bits(dst, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy speaks of infinities and NaNs
@pytest.mark.parametrize("src_dtype", DTYPES)
@pytest.mark.parametrize("dst_dtype", DTYPES)
def test_every_dtype_becomes_every_other_as_torch_rounds(
    src_dtype: torch.dtype, dst_dtype: torch.dtype, device: torch.device
) -> None:
    """Two-byte numbers: all of them, with infinities and NaNs; more than that of float32."""
    nbytes = torch.empty(0, dtype=src_dtype).element_size()
    numbers = torch.arange(1 << 16, device=device, dtype=torch.int32)
    if nbytes == 4:
        bits = numbers * 65_537 + torch.randint(0, 1 << 16, numbers.shape, device=device, dtype=torch.int32)
    else:
        bits = numbers.to(torch.int16 if nbytes == 2 else torch.int8)
    src = bits.view(src_dtype).view(-1, 1, 2, 16, 2, HEAD_DIM)
    dst = torch.zeros(src.shape, dtype=dst_dtype, device=device)
    expected, pages = dst.clone(), torch.arange(len(src), device=device)
    for pack, target in ((pack_pages, dst), (reference_pack_pages, expected)):
        pack(src, target, pages, pages, len(src) * 16)
    same = (dst.float() == expected.float()) | (dst.float().isnan() & expected.float().isnan())
    assert same.all()


def test_places_that_no_token_fills_become_zero(device: torch.device) -> None:
    src, dst = pool(2, 4, 2, torch.float32, device), pool(1, 8, 2, torch.float32, device)
    pages = torch.tensor([1, 0], device=device)
    pack_pages(src, dst, pages, torch.tensor([0], device=device), 5)
    assert torch.equal(dst[0, :, :, :4], src[1])
    assert torch.equal(dst[0, :, :, 4], src[0, :, :, 0])
    assert not dst[0, :, :, 5:].any()


def test_a_part_of_a_larger_page_can_be_the_target(device: torch.device) -> None:
    src, whole = pool(3, 4, 2, torch.float32, device), pool(3, 4, 4, torch.float32, device)
    pages, before = torch.arange(3, device=device), whole.clone()
    second = whole.view(3, 2, -1)[:, 1].view(3, NUM_LAYERS, 2, 4, 2, HEAD_DIM)
    pack_pages(src, second, pages, pages, 12)
    assert torch.equal(whole.view(3, 2, -1)[:, 1], src.view(3, -1))
    assert torch.equal(whole.view(3, 2, -1)[:, 0], before.view(3, 2, -1)[:, 0])
