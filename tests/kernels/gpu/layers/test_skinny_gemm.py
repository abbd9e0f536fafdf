from __future__ import annotations

import pytest
import torch
from gpu_cases import NARROW, on_gpu
from torch import Tensor

from diptych.kernels.gpu.layers.skinny_gemm import MAX_ROWS, choose_tile, pays_up_to, skinny_gemm

TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of what is rounded once
LLAMA_3_8B = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096)]


def inputs(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, a weight, and a result that says where nothing was written."""
    x, weight = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
    return x, weight, torch.full((m, n), torch.nan, dtype=dtype, device=device)


def assert_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    expected = x.double() @ weight.double().T
    bound = TOLERANCES[x.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound * x.shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 256), (16, 40, 272), (5, 17, 64)])
def test_it_equals_the_product_in_higher_precision(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, out = inputs(m, n, k, dtype, device)
    skinny_gemm(x, weight, out)
    assert_product(x, weight, out)


@pytest.mark.parametrize("m", [on_gpu(m) for m in (1, 3, 8, 16)])
@pytest.mark.parametrize(("n", "k"), [*LLAMA_3_8B, (960, 576), (576, 1536), (1024, 14_336), (32_064, 4096)])
def test_it_equals_the_product_for_the_shapes_of_models(m: int, n: int, k: int, device: torch.device) -> None:
    x, weight, out = inputs(m, n, k, torch.bfloat16, device)
    skinny_gemm(x, weight, out)
    assert_product(x, weight, out)


@pytest.mark.parametrize(("n", "k"), [on_gpu(33, 528), on_gpu(512, 14_336), on_gpu(6144, 4096)])
def test_a_row_comes_out_the_same_bit_for_bit_beside_any_others_and_every_time(
    n: int, k: int, device: torch.device
) -> None:
    x, weight, out = inputs(MAX_ROWS, n, k, torch.float16, device)
    skinny_gemm(x, weight, out)
    for m in (1, 5, MAX_ROWS):
        fewer = torch.full_like(out[-m:], torch.nan)
        skinny_gemm(x[-m:], weight, fewer)
        assert torch.equal(fewer, out[-m:])


def test_more_than_sixteen_rows_are_refused(device: torch.device) -> None:
    x, weight, out = inputs(17, 16, 64, torch.float16, device)
    with pytest.raises(AssertionError):
        skinny_gemm(x, weight, out)


@pytest.mark.parametrize(("n", "block_n"), [(128_256, 64), (8192, 64), (6144, 32), (4096, 32), (2048, 16), (576, 16)])
def test_programs_have_as_many_rows_as_leave_enough_of_them(n: int, block_n: int) -> None:
    assert choose_tile(n).block_n == block_n


def test_it_pays_where_a_weight_is_shared_out_evenly() -> None:
    assert [pays_up_to(n, k) for n, k in LLAMA_3_8B] == [0, MAX_ROWS, 0, MAX_ROWS, MAX_ROWS]
    assert [pays_up_to(n, k) for n, k in ((4096, 4100), (576, 1536), (32_064, 4096))] == [0, 0, 0]
