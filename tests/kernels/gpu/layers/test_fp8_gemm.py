from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_cases import NARROW
from torch import Tensor

from diptych.kernels.gpu.layers.fp8_gemm import fp8_gemm, reference_fp8_gemm
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix
from diptych.kernels.gpu.layers.fp8_rows import GROUP, quantize_rows
from diptych.kernels.quantized import QuantizedArray

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of what is rounded once
GROUPS = [0, GROUP]


def array(n: int, k: int, group: int) -> QuantizedArray:
    rng = np.random.default_rng(n + k)
    codes = rng.integers(0, 0x7F, (n, k), np.uint8) | (rng.integers(0, 2, (n, k), np.uint8) << 7)
    if not group:
        return QuantizedArray("fp8", codes, rng.uniform(1e-4, 1e-3, (n, 1)).astype(np.float32))
    blocks = rng.uniform(1e-4, 1e-3, (-(-n // GROUP), -(-k // GROUP))).astype(np.float32)
    return QuantizedArray("fp8", codes, np.repeat(blocks, GROUP, axis=0)[:n], None, GROUP)


def rows_of(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(m, k, device=device) * torch.logspace(-3, 1, max(1, m), device=device)[:m, None]).to(dtype)


def assert_product(x: Tensor, weight: Fp8Matrix, out: Tensor) -> None:
    expected = reference_fp8_gemm(quantize_rows(x, weight.group), weight)
    bound = TOLERANCES[x.dtype]
    largest = expected.abs().amax(dim=1, keepdim=True) if len(x) else expected
    torch.testing.assert_close(out.double() / largest, expected / largest, rtol=bound, atol=bound / 8)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize(("m", "k"), [(0, 64), (1, 1), (3, 200), (2, 2100)])
@pytest.mark.parametrize("group", GROUPS)
def test_the_largest_of_a_group_becomes_the_largest_code(
    m: int, k: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = rows_of(m, k, dtype, device)
    x[1:2] = 0
    rows = quantize_rows(x, group)
    assert rows.scales.shape == (m, -(-k // group) if group else 1)
    assert rows.codes[:1].float().abs().amax() == 448 if m else rows.codes.numel() == 0
    torch.testing.assert_close(rows.dequantize(), x.float(), rtol=2.0**-4, atol=2e-3 * 10)
    assert not rows.dequantize()[1:2].any()


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(0, 16, 64), (1, 48, 256), (1, 7, 272), (3, 130, 400), (4, 5, 40), (5, 40, 272), (17, 130, 576)]
)
@pytest.mark.parametrize("group", GROUPS)
def test_it_equals_the_product_of_quantised_rows(
    m: int, n: int, k: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = rows_of(m, k, dtype, device), Fp8Matrix.of(array(n, k, group), device)
    wide = torch.full((m, n + 8), torch.nan, dtype=dtype, device=device)
    fp8_gemm(x, weight, wide[:, 4:-4])
    assert_product(x, weight, wide[:, 4:-4])
    assert wide[:, :4].isnan().all()
    assert wide[:, -4:].isnan().all()
