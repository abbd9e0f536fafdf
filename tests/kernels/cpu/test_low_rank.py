"""What adapters add, against float64; other tokens keep their bits, and so does a token in any batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.low_rank import LowRankTable, PackedLowRank, Product, pack
from diptych.kernels.token_groups import TokenGroups

SHAPES = [(1, 1, 1), (33, 8, 7), (64, 16, 100), (100, 3, 33), (576, 64, 1536), (40, 70, 5)]  # rows, rank, columns
NUM_TOKENS, WIDTH = 50, 700
OWNERS = {
    "one adapter, all tokens": [1] * NUM_TOKENS,
    "one token": [-1] * 7 + [2] + [-1] * 42,
    "three adapters and none, interleaved": ([2, -1, 0, 0, 1] * 10),
    "an empty slot": ([3, 1] * 25),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(products: Sequence[Product]) -> PackedLowRank:
    return pack({"other": [(torch.ones(3, 5), torch.ones(9, 3), 0)], "matrix": products})["matrix"]


class Case:
    """Three adapters of two products each, one behind the other; slot 3 is empty."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        num_rows, rank, num_columns = shape
        self.x = random(NUM_TOKENS, num_columns, seed=2)
        self.before = random(NUM_TOKENS, WIDTH, seed=3)
        self.table = LowRankTable(4)
        self.exact: dict[int, Tensor] = {}  # what each adapter adds to every token
        for slot in range(3):
            parts = [(rank, num_rows, 2), (rank + slot, 1 + num_rows // 8, 5 + num_rows)]
            products = [(random(r, num_columns, seed=r), random(n, r, seed=slot), start) for r, n, start in parts]
            self.table.install(slot, packed(products))
            self.exact[slot] = torch.zeros(NUM_TOKENS, WIDTH, dtype=torch.float64)
            for a, b, start in products:
                added = (self.x.double() @ a.double().T) @ b.double().T
                self.exact[slot][:, start : start + len(b)] += added

    def add(self, owner: list[int], tokens: slice = slice(None)) -> Tensor:
        out = self.before[tokens].clone()
        groups = TokenGroups.of(np.array(owner[tokens]))
        if groups is not None:
            self.table.add(self.x[tokens], groups, out)
        return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_each_token_gets_what_its_adapter_adds_and_nothing_else_changes(
    shape: tuple[int, int, int], owner: list[int], num_threads: int
) -> None:
    case = Case(shape)
    out = case.add(owner)
    for token, slot in enumerate(owner):
        added = case.exact.get(slot)
        if added is None:
            assert torch.equal(out[token], case.before[token])
            continue
        expected = case.before[token].double() + added[token]
        torch.testing.assert_close(out[token].double(), expected, atol=3e-5 * (shape[1] * shape[2]) ** 0.5, rtol=0)
        untouched = added[token] == 0
        assert torch.equal(out[token][untouched], case.before[token][untouched])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_in_any_batch(shape: tuple[int, int, int], num_threads: int) -> None:
    case, owner = Case(shape), OWNERS["three adapters and none, interleaved"]
    together = case.add(owner)
    for token in (0, 2, 3, 15, 16, 49):
        assert torch.equal(case.add(owner, slice(token, token + 1))[0], together[token])


def test_a_removed_adapter_adds_nothing_and_its_slot_takes_another() -> None:
    case, owner = Case((33, 8, 7)), [1] * NUM_TOKENS
    case.table.remove(1)
    assert torch.equal(case.add(owner), case.before)
    case.table.install(1, packed([(random(2, 7, seed=0), torch.zeros(4, 2), 0)]))
    assert torch.equal(case.add(owner), case.before)


def test_an_adapter_of_fewer_products_takes_the_place_of_another_whole() -> None:
    """Nobody removes what is in a slot before one that was waiting comes into it."""
    case, owner = Case((33, 8, 7)), [1] * NUM_TOKENS
    case.table.install(1, packed([(random(2, 7, seed=0), torch.zeros(4, 2), 0)]))
    assert torch.equal(case.add(owner), case.before)


def test_groups_are_the_tokens_of_each_slot() -> None:
    groups = TokenGroups.of(np.array([2, -1, 0, 2, -1]))
    assert groups is not None
    assert [each.tolist() for each in (groups.slots, groups.offsets, groups.tokens)] == [[0, 2], [0, 1, 3], [2, 0, 3]]
    assert TokenGroups.of(np.array([-1, -1])) is None
    assert TokenGroups.of(np.array([], dtype=np.int64)) is None


def test_shapes_that_do_not_fit_are_caught_before_memory_is_touched() -> None:
    case = Case((33, 8, 7))
    groups = TokenGroups.of(np.zeros(NUM_TOKENS, np.int64))
    assert groups is not None
    for x, out in ((case.x[:, :6], case.before), (case.x, case.before[:, :42]), (case.x[:9], case.before[:9])):
        with pytest.raises(AssertionError):
            case.table.add(x.contiguous(), groups, out.contiguous())
    with pytest.raises(AssertionError):
        packed([(torch.zeros(2, 7), torch.zeros(4, 3), 0)])
    with pytest.raises(AssertionError):
        case.table.install(3, packed([(torch.zeros(2, 8), torch.zeros(4, 2), 0)]))
