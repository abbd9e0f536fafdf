from __future__ import annotations

import pytest
import torch
from gpu_cases import NARROW, on_gpu

from diptych.kernels.gpu.layers.fixed_gemm import FEW, MANY, RowsTile, fixed_gemm

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of what is rounded once


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 64), (1, 48, 256), (70, 40, 272), (130, 17, 64)])
def test_it_equals_the_product_in_higher_precision(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
    out = torch.full((m, n), torch.nan, dtype=dtype, device=device)
    fixed_gemm(x, weight, out)
    bound = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=bound, atol=bound * k**0.5)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("n", "k"), [on_gpu(*shape) for shape in ((33, 528), (6144, 4096), (4096, 14_336), (1000, 1040))]
)
def test_a_row_has_the_same_bits_beside_any_number_of_others_and_by_any_tile(
    n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = (torch.randn(rows, k, device=device).to(dtype) for rows in (300, n))
    whole = product(x, weight, MANY)
    for first, last in ((0, 1), (7, 24), (250, 300), (100, 180)):
        part = x[first:last].contiguous()
        assert all(torch.equal(product(part, weight, tile), whole[first:last]) for tile in (None, FEW, MANY))


def product(x: torch.Tensor, weight: torch.Tensor, tile: RowsTile | None) -> torch.Tensor:
    out = x.new_full((len(x), len(weight)), torch.nan)
    fixed_gemm(x, weight, out, tile)
    return out
