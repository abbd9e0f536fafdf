from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_cases import NARROW, on_gpu
from torch import Tensor

from diptych.kernels.gpu.layers.activations import Activation, gelu_tanh_and_mul, silu_and_mul
from diptych.kernels.gpu.layers.fp8_gemm import SOME_ROWS, fp8_gemm, has_library, reference_fp8_gemm
from diptych.kernels.gpu.layers.fp8_gemv import can_gate, fp8_gated_gemv, fp8_gemv
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix, blocks_of, can_keep
from diptych.kernels.gpu.layers.fp8_rows import GROUP, quantize_rows
from diptych.kernels.quantized import QuantizedArray, stack

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
    bound, is_coarse = TOLERANCES[x.dtype], len(x) > SOME_ROWS and has_library(weight, out)
    largest = expected.abs().amax(dim=1, keepdim=True) if len(x) else expected
    atol = bound if is_coarse else bound / 8
    torch.testing.assert_close(out.double() / largest, expected / largest, rtol=bound, atol=atol)


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


def test_a_weight_is_quantised_by_the_rule_of_states(device: torch.device) -> None:
    weight = rows_of(5, 200, torch.bfloat16, device)
    weight[1:3] = torch.tensor([[0.0], [1e-15]])  # smaller than what rows are divided by at least
    made, rows = Fp8Matrix.made(weight), quantize_rows(weight, 0)
    torch.testing.assert_close(made.scales, rows.scales, rtol=1e-6, atol=0)
    torch.testing.assert_close(made.codes.float(), rows.codes.float(), rtol=2.0**-3, atol=2.0**-9)  # the next code
    assert (made.codes.float() != rows.codes.float()).float().mean() < 0.01


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


@pytest.mark.parametrize("m", [on_gpu(m) for m in (1, 5, 16, 17, 64, 65, 1000)])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14_336), (1536, 640), (576, 7168)])
@pytest.mark.parametrize("group", GROUPS)
def test_it_equals_the_product_for_the_shapes_of_models(
    m: int, n: int, k: int, group: int, device: torch.device
) -> None:
    x, weight = rows_of(m, k, torch.bfloat16, device), Fp8Matrix.of(array(n, k, group), device)
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device=device)
    fp8_gemm(x, weight, out)
    assert_product(x, weight, out)


@pytest.mark.parametrize(("ffn_size", "k", "activation"), [(8, 272, "silu"), (16, 144, "gelu_tanh")])
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("group", GROUPS)
def test_gates_are_activated_as_if_their_products_were_stored(
    ffn_size: int, k: int, activation: Activation, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = rows_of(1, k, dtype, device), Fp8Matrix.of(array(2 * ffn_size, k, group), device)
    assert can_gate(weight) == (group == 0)
    assert not can_gate(Fp8Matrix.of(array(2, k, group), device))
    out, products = torch.full((1, ffn_size), torch.nan, dtype=dtype, device=device), x.new_empty(1, 2 * ffn_size)
    fp8_gated_gemv(x, weight, out, activation)
    fp8_gemv(x, weight, products)
    expected = torch.empty_like(out)
    (silu_and_mul if activation == "silu" else gelu_tanh_and_mul)(products, expected)
    torch.testing.assert_close(out, expected, rtol=2 * TOLERANCES[dtype], atol=TOLERANCES[dtype] / 100)


@pytest.mark.parametrize("group", GROUPS)
def test_a_row_has_the_same_codes_by_itself_and_beside_others(group: int, device: torch.device) -> None:
    x = rows_of(5, 300, torch.float16, device)
    together, alone = quantize_rows(x, group), quantize_rows(x[3:4], group)
    assert torch.equal(together.codes[3:4].view(torch.uint8), alone.codes.view(torch.uint8))
    assert torch.equal(together.scales[3:4], alone.scales)


def test_blocks_of_matrices_on_top_of_each_other_begin_with_each_of_them(device: torch.device) -> None:
    pieces = [array(n, 256, GROUP) for n in (192, 128, 5)]
    whole = stack(pieces)
    assert can_keep(whole)
    assert [len(each) for each in blocks_of(whole)] == [192, 133]  # 133: blocks of 128 and 5
    kept = torch.cat([Fp8Matrix.of(each, device).dequantize() for each in blocks_of(whole)])
    assert torch.equal(kept.cpu(), torch.from_numpy(whole.dequantize()))


def test_other_scales_than_of_rows_and_blocks_are_not_kept() -> None:
    codes = np.zeros((300, 256), np.uint8)
    of_each_row = np.arange(600, dtype=np.float32).reshape(300, 2)
    assert not can_keep(QuantizedArray("fp8", codes, of_each_row, None, GROUP))
    assert not can_keep(QuantizedArray("fp8", codes, np.ones((300, 4), np.float32), None, 64))
    assert not can_keep(QuantizedArray("int8", codes.view(np.int8), np.ones((300, 1), np.float32)))


def test_rows_of_a_weight_are_looked_up(device: torch.device) -> None:
    for group in GROUPS:
        stored = array(130, 200, group)
        ids = torch.tensor([129, 0, 127], device=device)
        expected = torch.from_numpy(stored.dequantize())[ids.cpu()]
        assert torch.equal(Fp8Matrix.of(stored, device).rows(ids).cpu(), expected)
