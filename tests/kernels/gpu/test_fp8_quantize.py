from __future__ import annotations

import pytest
import torch
from gpu_cases import FLOATS, on_gpu
from torch import Tensor

from diptych.kernels.gpu.fp8_quantize import (
    quantize_fp8,
    quantize_fp8_static,
    reference_quantize_fp8,
    reference_quantize_fp8_static,
)

SHAPES = [(1, 64), (3, 1000), (2, 4096), on_gpu(4099, 4096), on_gpu(64, 28_672)]


def rows(count: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of very different magnitudes, the last all zeros."""
    magnitudes = 10 ** torch.linspace(-3, 3, count, device=device)
    x = torch.randn(count, size, device=device) * magnitudes[:, None]
    x[-1] = 0
    return x.to(dtype)


def poisoned(x: Tensor) -> Tensor:
    return torch.full(x.shape, 0x7F, dtype=torch.uint8, device=x.device).view(torch.float8_e4m3fn)


def assert_same_bits(out: Tensor, expected: Tensor) -> None:
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("count", "size"), SHAPES)
def test_rows_and_scales_equal_the_reference_bit_for_bit(
    count: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = rows(count, size, dtype, device)
    out, scales = poisoned(x), torch.full((count,), torch.nan, device=device)
    quantize_fp8(x, out, scales)
    expected, expected_scales = reference_quantize_fp8(x)
    assert torch.equal(scales, expected_scales)
    assert_same_bits(out, expected)


def test_what_is_no_number_stays_so_and_spoils_no_other(device: torch.device) -> None:
    x = torch.randn(2, 100, device=device)
    x[1, 7] = torch.nan
    out, scales = torch.zeros_like(x, dtype=torch.float8_e4m3fn), torch.empty(2, device=device)
    quantize_fp8(x, out, scales)
    expected, expected_scales = reference_quantize_fp8(x)
    assert_same_bits(out, expected)
    assert torch.equal(scales, expected_scales)
    quantize_fp8_static(x, out, 0.01)
    assert_same_bits(out, reference_quantize_fp8_static(x, 0.01))
    assert torch.equal(out.float().isnan(), x.isnan())


@pytest.mark.parametrize(("count", "size"), SHAPES)
def test_each_number_is_within_its_step_of_what_it_was(count: int, size: int, device: torch.device) -> None:
    """Relative half a step of three bits, or an absolute one below the smallest normal number."""
    x = torch.randn(count, size, device=device)
    out, scales = poisoned(x), torch.empty(count, device=device)
    quantize_fp8(x, out, scales)
    error = (out.double() * scales.double()[:, None] - x.double()).abs()
    bound = torch.maximum(x.double().abs() * 2**-4, scales.double()[:, None] * 2**-10)
    assert (error <= bound * 1.0001).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1.0, 0.037, 300.0])
def test_a_given_scale_is_used_and_what_is_too_large_becomes_the_largest(
    scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    x = rows(5, 1001, dtype, device)
    out = poisoned(x)
    quantize_fp8_static(x, out, scale)
    assert_same_bits(out, reference_quantize_fp8_static(x, scale))
    assert out.float().abs().max() <= 448
