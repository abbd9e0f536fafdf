"""What low-rank adapters add to a matrix product, for some tokens of a batch each. See low_rank.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diptych.kernels.cpu.library import address, load
from diptych.kernels.token_groups import TokenGroups

MAX_PRODUCTS: Final = 4  # of one adapter on one matrix

Product = tuple[Tensor, Tensor, int]  # a [rank, num_columns], b [num_rows, rank], first column of `out`: float32


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """An adapter's products on one matrix."""

    memory: Tensor  # of the whole adapter: it is kept
    rows: Tensor  # int64 [num_products, 5]: struct low_rank
    num_columns: int
    last_row: int  # of what is added to, plus 1


def pack(adapter: Mapping[str, Sequence[Product]]) -> dict[str, PackedLowRank]:
    """Lay out an adapter's products by matrix, in one piece of memory. The originals may be dropped."""
    library = load()
    memory = torch.empty(sum(_num_floats(product) for products in adapter.values() for product in products))
    library.diptych_use_huge_pages(address(memory), len(memory))
    at, packed = address(memory), {}
    for name, products in adapter.items():
        assert 0 < len(products) <= MAX_PRODUCTS, (name, len(products))
        rows = []
        for product in products:
            rows.append(_pack(product, at))
            at += 4 * _num_floats(product)
        (num_columns,) = {a.shape[1] for a, _, _ in products}
        last_row = max(start + len(b) for _, b, start in products)
        packed[name] = PackedLowRank(memory, torch.tensor(rows), num_columns, last_row)
    return packed


def _num_floats(product: Product) -> int:
    a, b, _ = product
    panel: int = load().diptych_panel()
    return _a_floats(a) + -(-len(b) // panel) * panel * b.shape[1]


def _a_floats(a: Tensor) -> int:
    return int(load().diptych_packed_a_floats(*a.shape))


def _pack(product: Product, at: int) -> tuple[int, ...]:
    """Write a product to where `at` says; return its struct low_rank."""
    a, b, start = product
    (rank, num_columns), num_rows = a.shape, len(b)
    assert b.shape[1] == rank, (a.shape, b.shape)
    at_b = at + 4 * _a_floats(a)
    load().diptych_pack_a(address(a), rank, num_columns, at)
    load().diptych_pack(address(b), num_rows, rank, at_b)
    return at, at_b, rank, num_rows, start


class LowRankTable:
    """The adapters of one matrix, by slot."""

    def __init__(self, num_slots: int) -> None:
        self._library = load()
        self._table = torch.zeros(num_slots, MAX_PRODUCTS, 5, dtype=torch.int64)
        self._packed: dict[int, PackedLowRank] = {}  # keeps the memory
        self._num_columns = 0  # of x; 0: not known yet
        self._last_row = 0  # of what is added to, plus 1: the largest so far

    def install(self, slot: int, packed: PackedLowRank) -> None:
        assert self._num_columns in (0, packed.num_columns), (self._num_columns, packed.num_columns)
        self._num_columns, self._last_row = packed.num_columns, max(self._last_row, packed.last_row)
        self.remove(slot)  # which another adapter of more products may have
        self._packed[slot] = packed
        self._table[slot, : len(packed.rows)] = packed.rows

    def remove(self, slot: int) -> None:
        self._table[slot] = 0
        self._packed.pop(slot, None)

    def add(self, x: Tensor, groups: TokenGroups, out: Tensor) -> None:
        """Add to `out` what each group's adapter makes of its tokens of `x`."""
        assert len(x) == len(out) == groups.num_tokens, (x.shape, out.shape, groups.num_tokens)
        assert self._num_columns in (0, x.shape[1]), (x.shape, self._num_columns)
        assert self._last_row <= out.shape[1], (out.shape, self._last_row)
        failed = self._library.diptych_add_low_rank(
            *(self._table.data_ptr(), MAX_PRODUCTS),
            *(groups.slots.data_ptr(), groups.offsets.data_ptr(), groups.tokens.data_ptr(), len(groups.slots)),
            *(address(x), address(out), x.shape[1], out.shape[1]),
        )
        if failed:
            raise MemoryError("the products of adapters need more memory than there is")
