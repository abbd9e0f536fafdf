"""Heads that keep a matrix, against the same written out in torch in double precision. No vector divides some sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.recurrences import kimi_delta, state_spaces

STARTS, SLOTS = torch.tensor([0, 3, 4, 4, 9]), torch.tensor([2, 0, 4, 3])  # one of the requests has no token
NUM_TOKENS, NUM_SLOTS = 9, 5
WIDTHS = [1, 3, 16, 37, 68, 132]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def with_gaps(*shape: int) -> Tensor:
    """States as they lie in a pool: parts of something larger."""
    size = torch.Size(shape).numel()
    return torch.randn(NUM_SLOTS, size + 5)[:, :size].view(NUM_SLOTS, *shape)


def spans() -> list[tuple[int, range]]:
    starts = STARTS.tolist()
    return [(slot, range(*ends)) for slot, ends in zip(SLOTS.tolist(), itertools.pairwise(starts), strict=True)]


@pytest.mark.parametrize("dim", WIDTHS)
def test_kimis_delta_rule_token_by_token(dim: int) -> None:
    num_heads = 3
    queries, keys, values = torch.randn(3, NUM_TOKENS, num_heads, dim).div(dim**0.5).unbind()
    remains, betas = torch.rand(NUM_TOKENS, num_heads, dim), torch.rand(NUM_TOKENS, num_heads)
    kept, out = with_gaps(num_heads, dim, dim), torch.empty(NUM_TOKENS, num_heads, dim)
    wide, expected = kept.double(), torch.empty(NUM_TOKENS, num_heads, dim, dtype=torch.float64)
    for slot, tokens in spans():
        for token in tokens:
            wide[slot] *= remains[token, :, :, None].double()
            found = torch.einsum("hkv,hk->hv", wide[slot], keys[token].double())
            change = (values[token] - found) * betas[token, :, None]
            wide[slot] += torch.einsum("hk,hv->hkv", keys[token].double(), change)
            expected[token] = torch.einsum("hkv,hk->hv", wide[slot], queries[token].double())
    kimi_delta(queries, keys, remains, values, betas, kept, STARTS, SLOTS, out)
    torch.testing.assert_close((out.double(), kept.double()), (expected, wide), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("groups", [1, 2])
def test_state_spaces_token_by_token(groups: int, size: int) -> None:
    num_heads, dim = 4, 5
    amounts, remains = torch.randn(NUM_TOKENS, num_heads, dim), torch.rand(NUM_TOKENS, num_heads)
    writing, reading = torch.randn(2, NUM_TOKENS, groups, size).div(size**0.5).unbind()
    kept, out = with_gaps(num_heads, dim, size), torch.empty(NUM_TOKENS, num_heads, dim)
    wide, expected = kept.double(), torch.empty(NUM_TOKENS, num_heads, dim, dtype=torch.float64)
    of_heads = [each.double().repeat_interleave(num_heads // groups, dim=1) for each in (writing, reading)]
    for slot, tokens in spans():
        for token in tokens:
            wide[slot] *= remains[token, :, None, None].double()
            wide[slot] += amounts[token, :, :, None] * of_heads[0][token, :, None]
            expected[token] = torch.einsum("hdn,hn->hd", wide[slot], of_heads[1][token])
    state_spaces(amounts, writing, reading, remains, kept, STARTS, SLOTS, out)
    torch.testing.assert_close((out.double(), kept.double()), (expected, wide), rtol=1e-5, atol=1e-5)
