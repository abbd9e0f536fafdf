"""Norm and activation against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.kernels.cpu import elementwise

SHAPES = [(1, 1), (1, 576), (17, 33), (100, 64), (3, 1000)]
EPS = 1e-5


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_is_that_of_float64(shape: tuple[int, int], num_threads: int) -> None:
    x, weight, out = random(*shape), random(shape[1]), torch.empty(shape)
    elementwise.rms_norm(x, weight, EPS, out)
    torch.testing.assert_close(
        out.double(), F.rms_norm(x.double(), shape[1:], weight.double(), EPS), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(x, random(*shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_adds_in_place_first(shape: tuple[int, int], num_threads: int) -> None:
    x, delta, weight, out = random(*shape), random(*shape, scale=3.0), random(shape[1]), torch.empty(shape)
    total = x + delta
    elementwise.add_rms_norm(x, delta, weight, EPS, out)
    assert torch.equal(x, total)
    torch.testing.assert_close(
        out.double(), F.rms_norm(total.double(), shape[1:], weight.double(), EPS), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_and_mul_is_that_of_float64_also_far_from_zero(
    shape: tuple[int, int], scale: float, num_threads: int
) -> None:
    gate_up, out = random(shape[0], 2 * shape[1], scale=scale), torch.empty(shape)
    elementwise.silu_and_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=2e-6, atol=1e-25)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES)
def test_clamped_swiglu_is_that_of_float64_also_far_from_zero(
    shape: tuple[int, int], scale: float, num_threads: int
) -> None:
    gate_up, out = random(shape[0], 2 * shape[1], scale=scale), torch.empty(shape)
    elementwise.clamped_swiglu(gate_up, out, alpha=1.702, limit=7.0)
    gate, up = gate_up.double().chunk(2, dim=1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    torch.testing.assert_close(out.double(), gate * torch.sigmoid(1.702 * gate) * (up + 1), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_tanh_and_mul_is_that_of_float64_also_far_from_zero(
    shape: tuple[int, int], scale: float, num_threads: int
) -> None:
    gate_up, out = random(shape[0], 2 * shape[1], scale=scale), torch.empty(shape)
    elementwise.gelu_tanh_and_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(out.double(), F.gelu(gate, approximate="tanh") * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(4, 2, 64), (3, 1, 96), (2, 2, 10)])
def test_norm_heads_norms_each_query_and_key_and_no_value(
    num_heads: int, num_kv_heads: int, dim: int, num_threads: int
) -> None:
    qkv, weights = random(40, (num_heads + 2 * num_kv_heads) * dim), random(2, dim)
    heads = qkv.double().view(40, -1, dim)
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    normed = [F.rms_norm(x, (dim,), w.double(), EPS) for x, w in zip((queries, keys), weights, strict=True)]
    elementwise.norm_heads(qkv, num_heads, weights[0], weights[1], EPS)
    expected = torch.cat((*normed, values), dim=1).view(40, -1)
    torch.testing.assert_close(qkv.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES)
def test_mul_sigmoid_is_that_of_float64_also_far_from_zero(
    shape: tuple[int, int], scale: float, num_threads: int
) -> None:
    x, gates = random(*shape), random(*shape, scale=scale).flip(0).contiguous()
    expected = x.double() * gates.double().sigmoid()
    elementwise.mul_sigmoid(x, gates)
    torch.testing.assert_close(x.double(), expected, rtol=2e-6, atol=1e-25)


def test_a_gated_number_has_the_same_bits_wherever_it_stands() -> None:
    x, gates = random(17, 33), random(33, 17).T.contiguous()
    expected = x.clone()
    elementwise.mul_sigmoid(expected, gates)
    for row, column in ((0, 0), (3, 7), (16, 31), (16, 32)):
        alone = x[row : row + 1, column : column + 1].contiguous()
        elementwise.mul_sigmoid(alone, gates[row : row + 1, column : column + 1].contiguous())
        assert torch.equal(alone[0, 0], expected[row, column])
