from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from diptych.kernels.gpu.attention.rope_store import reference_rope_store, rope_store

ON_GPU: Final = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
DTYPES: Final = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=ON_GPU)]
FP8: Final = torch.float8_e4m3fn

Kernel = Callable[..., None]


def stored(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int = 5,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    rope_dim: int = 16,
    page_size: int = 4,
    kv_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int64,
    **scales: Any,
) -> tuple[Tensor, Tensor]:
    """The queries and the bytes of the pool after some tokens, of which the second and the last are padding."""
    torch.manual_seed(1)
    num_heads, num_kv_heads = heads
    qkv = (3 * torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)).to(dtype)
    angles = 10 * torch.randn(50, rope_dim // 2)
    num_pages = 3 + num_tokens // page_size
    slots = torch.randperm(num_pages * page_size)[:num_tokens].to(index_dtype)
    slots[[1, -1]] = -1
    positions = torch.randint(0, 50, (num_tokens,), dtype=index_dtype)
    pool = torch.full((num_pages, 2, 2, page_size, num_kv_heads, head_dim), 7.0).to(kv_dtype or dtype).to(device)
    qkv, positions, slots = qkv.to(device), positions.to(device), slots.to(device)
    table = torch.stack((angles.cos(), angles.sin()), dim=1).to(device)
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    kernel(qkv, positions, slots, table, pool[:, 1], **sizes, **scales)
    return qkv[:, : num_heads * head_dim].cpu(), pool.view(torch.uint8).cpu()


def check(device: torch.device, dtype: torch.dtype, **options: Any) -> None:
    """Bit for bit: the queries, and every byte of the pool, those of other layers and slots included."""
    queries, pool = stored(rope_store, device, dtype, **options)
    expected_queries, expected_pool = stored(reference_rope_store, torch.device("cpu"), dtype, **options)
    torch.testing.assert_close(queries, expected_queries, rtol=0, atol=0)
    torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_numbers_are_those_of_torch_bit_for_bit(
    dtype: torch.dtype, index_dtype: torch.dtype, device: torch.device
) -> None:
    check(device, dtype, index_dtype=index_dtype)


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(16, 4), (80, 32), (96, 96), (128, 128), (256, 64)])
def test_the_dimensions_behind_those_that_turn_stay_as_they_are(
    head_dim: int, rope_dim: int, device: torch.device
) -> None:
    check(device, torch.float16, head_dim=head_dim, rope_dim=rope_dim)


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (32, 8)])
def test_there_may_be_any_number_of_heads(heads: tuple[int, int], device: torch.device) -> None:
    check(device, torch.float16, heads=heads, head_dim=128, rope_dim=128, page_size=16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [{}, {"k_scale": 0.01, "v_scale": 0.03}], ids=["unscaled", "scaled"])
def test_float8_is_divided_by_its_scale_and_at_most_448(
    dtype: torch.dtype, scales: dict[str, Any], device: torch.device
) -> None:
    check(device, dtype, kv_dtype=FP8, **scales)


def test_a_pool_may_be_narrower_than_the_states(device: torch.device) -> None:
    check(device, torch.float32, kv_dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_a_long_step_is_as_exact(page_size: int, kv_dtype: torch.dtype) -> None:
    shape: dict[str, Any] = {
        "num_tokens": 8192,
        "heads": (32, 8),
        "head_dim": 128,
        "rope_dim": 128,
        "page_size": page_size,
    }
    check(torch.device("cuda"), torch.bfloat16, kv_dtype=kv_dtype, **shape)
