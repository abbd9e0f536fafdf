from __future__ import annotations

import pytest
import torch
from gpu_cases import FLOATS, on_gpu
from torch import Tensor

from diptych.engine.models.arithmetic.ops import TorchOps
from diptych.kernels.gpu.layers.norms import add_rms_norm, norm_heads, rms_norm

EPS = 1e-5
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # two of the last bit
SHAPES = [(1, 64), (3, 576), (2, 4096), on_gpu(1, 4096), on_gpu(4099, 3584), on_gpu(64, 32_768)]


def assert_close(value: Tensor, expected: Tensor) -> None:
    """Narrow numbers are the same, as they are rounded where torch rounds, but for a few that are next to a half."""
    torch.testing.assert_close(value, expected, rtol=TOLERANCES[value.dtype], atol=1e-7)
    assert value.dtype == torch.float32 or (value == expected).double().mean() > 0.99


def rows(count: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows of very different magnitudes, as residual streams have them."""
    magnitudes = 10 ** torch.linspace(-2, 2, count, device=device)
    return (torch.randn(count, size, device=device) * magnitudes[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weights_are_wide", [False, True])
@pytest.mark.parametrize(("count", "size"), SHAPES)
def test_rows_are_normed_and_rounded_as_torch_does_it(
    count: int, size: int, weights_are_wide: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = rows(count, size, dtype, device)
    weight = torch.randn(size, device=device).to(torch.float32 if weights_are_wide else dtype)
    out, expected = torch.full_like(x, torch.nan), torch.empty_like(x)
    rms_norm(x, weight, EPS, out)
    TorchOps(dtype).rms_norm(x, weight, EPS, expected)
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("count", "size"), SHAPES)
def test_what_is_added_is_in_the_stream_and_in_the_norm(
    count: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, delta = rows(count, size, dtype, device), rows(count, size, dtype, device).flip(0).contiguous()
    stream, weight = x.clone(), torch.randn(size, device=device).to(dtype)
    out, expected = torch.full_like(x, torch.nan), torch.empty_like(x)
    add_rms_norm(stream, delta, weight, EPS, out)
    TorchOps(dtype).add_rms_norm(x, delta, weight, EPS, expected)
    assert torch.equal(stream, x)
    assert_close(out, expected)


def test_the_norm_may_take_the_place_of_what_went_in(device: torch.device) -> None:
    x, delta, weight = (torch.randn(shape, device=device) for shape in ((3, 100), (3, 100), (100,)))
    expected = torch.empty_like(x)
    TorchOps(x.dtype).add_rms_norm(x.clone(), delta, weight, EPS, expected)
    add_rms_norm(x, delta, weight, EPS, delta)
    assert_close(delta, expected)
    rms_norm(x, weight, EPS, x)
    assert_close(x, expected)


def test_no_rows_are_no_work(device: torch.device) -> None:
    none, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    rms_norm(none, weight, EPS, none)
    add_rms_norm(none, none, weight, EPS, none)


def test_rows_of_zeros_have_a_norm(device: torch.device) -> None:
    x = torch.zeros(2, 48, device=device)
    out = torch.full_like(x, torch.nan)
    rms_norm(x, torch.ones(48, device=device), EPS, out)
    assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weights_are_wide", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (8, 1, 128), (16, 16, 64), (3, 1, 256), on_gpu(64, 8, 128)]
)
def test_queries_and_keys_are_normed_in_place_and_values_stay(
    num_heads: int, num_kv_heads: int, head_dim: int, weights_are_wide: bool, dtype: torch.dtype, device: torch.device
) -> None:
    qkv = rows(3, (num_heads + 2 * num_kv_heads) * head_dim, dtype, device)
    dtype_of_weights = torch.float32 if weights_are_wide else dtype
    q_weight, k_weight = (torch.randn(head_dim, device=device).to(dtype_of_weights) for _ in range(2))
    expected = qkv.clone()
    norm_heads(qkv, num_heads, q_weight, k_weight, EPS)
    TorchOps(dtype).norm_heads(expected, num_heads, q_weight, k_weight, EPS)
    assert_close(qkv, expected)
    values = -num_kv_heads * head_dim
    assert torch.equal(qkv[:, values:], expected[:, values:])
