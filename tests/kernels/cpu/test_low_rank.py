"""What an adapter adds, against float64; other tokens keep their bits, and so does a token in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.low_rank import PackedLowRank

SHAPES = [(1, 1, 1), (33, 8, 7), (64, 16, 100), (100, 3, 33), (576, 64, 1536), (40, 70, 5)]  # rows, rank, columns
NUM_TOKENS, START, BEHIND = 50, 5, 3


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(shape: tuple[int, int, int]) -> tuple[PackedLowRank, Tensor, Tensor, Tensor]:
    """Return the product, x, out as it is before, and the exact part that is added for every token."""
    num_rows, rank, num_columns = shape
    a, b, x = random(rank, num_columns, seed=0), random(num_rows, rank, seed=1), random(NUM_TOKENS, num_columns, seed=2)
    exact = (x.double() @ a.double().T) @ b.double().T
    return PackedLowRank(a, b, START), x, random(NUM_TOKENS, START + num_rows + BEHIND, seed=3), exact


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [range(NUM_TOKENS), range(17), (0, 3, 4, 49), (7,)])
def test_the_product_is_added_for_the_tokens_and_nothing_else_changes(
    shape: tuple[int, int, int], tokens: range | tuple[int, ...], num_threads: int
) -> None:
    product, x, before, exact = case(shape)
    chosen = torch.tensor(tokens)
    expected = before.double()
    expected[chosen, START : START + shape[0]] += exact[chosen]
    out = before.clone()
    product.add(x, chosen, out)
    torch.testing.assert_close(out.double(), expected, atol=2e-5 * (shape[1] * shape[2]) ** 0.5, rtol=0)
    untouched = torch.ones_like(out, dtype=torch.bool)
    untouched[chosen, START : START + shape[0]] = False
    assert torch.equal(out[untouched], before[untouched])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_in_any_batch(shape: tuple[int, int, int], num_threads: int) -> None:
    product, x, before, _ = case(shape)
    together, alone = before.clone(), before.clone()
    product.add(x, torch.arange(NUM_TOKENS), together)
    for token in (0, 15, 16, 49):
        product.add(x, torch.tensor([token]), alone)
        assert torch.equal(alone[token], together[token])


def test_no_tokens_are_no_work() -> None:
    product, x, before, _ = case((33, 8, 7))
    out = before.clone()
    product.add(x, torch.empty(0, dtype=torch.int64), out)
    assert torch.equal(out, before)


def test_shapes_that_do_not_fit_are_caught_before_memory_is_touched() -> None:
    product, x, out, _ = case((33, 8, 7))
    token = torch.tensor([0])
    for wrong in ((x[:, :6], out), (x, out[:, : START + 32]), (x[:4], out)):
        with pytest.raises(AssertionError):
            product.add(wrong[0].contiguous(), token, wrong[1].contiguous())
    with pytest.raises(AssertionError):
        product.add(x, token.int(), out)
