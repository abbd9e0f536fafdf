"""The packed matrix product against float64, and its promise: a token's result is the same in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.linear import PackedMatrix

SHAPES = [(1, 1), (31, 7), (32, 64), (33, 65), (100, 2049), (96, 576), (500, 3)]  # rows, columns
NUM_TOKENS = [1, 2, 5, 12, 13, 16, 100, 385, 800]


def multiply(weight: Tensor, x: Tensor) -> Tensor:
    out = torch.full((len(x), len(weight)), torch.nan)
    PackedMatrix(weight).multiply(x, out)
    return out


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float64(shape: tuple[int, int], num_tokens: int, num_threads: int) -> None:
    weight, x = random(*shape), random(num_tokens, shape[1], seed=1)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(multiply(weight, x).double(), expected, atol=2e-5 * shape[1] ** 0.5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_in_any_batch(shape: tuple[int, int], num_threads: int) -> None:
    weight, x = random(*shape), random(400, shape[1], seed=1)
    together = multiply(weight, x)
    for start, end in [(0, 1), (3, 5), (7, 23), (390, 400), (0, 399)]:
        assert torch.equal(multiply(weight, x[start:end]), together[start:end])


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_come_back_as_they_were(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    ids = torch.randint(shape[0], (50,), generator=torch.Generator().manual_seed(0))
    rows = PackedMatrix(weight).rows(ids)
    assert torch.equal(rows, weight[ids])
    assert rows.is_contiguous()


def test_no_tokens_are_no_work() -> None:
    assert multiply(random(40, 8), random(0, 8)).shape == (0, 40)


def test_shapes_that_do_not_fit_are_caught_before_memory_is_touched() -> None:
    matrix = PackedMatrix(random(40, 8))
    with pytest.raises(AssertionError):
        matrix.multiply(random(2, 9), torch.empty(2, 40))
    with pytest.raises(AssertionError):
        matrix.multiply(random(2, 8), torch.empty(2, 41))
    with pytest.raises(AssertionError):
        matrix.multiply(random(2, 16)[:, ::2], torch.empty(2, 40))
    with pytest.raises(AssertionError):
        matrix.multiply(random(2, 8).double(), torch.empty(2, 40))
