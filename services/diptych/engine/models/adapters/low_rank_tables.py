"""Adapters on CPUs, and by torch: a table for each matrix, whose products are computed one adapter after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from diptych.common.arrays import I64
from diptych.engine.models.adapters.lora import LowRankSetting, Prepared
from diptych.kernels.adapted_matrix import Product
from diptych.kernels.token_groups import TokenGroups

Prepare = Callable[[Mapping[str, Sequence[Product]]], Prepared]


class Table(Protocol):
    """What the adapters add to one matrix, by slot."""

    def install(self, slot: int, prepared: Any) -> None: ...

    def remove(self, slot: int) -> None: ...

    def add(self, x: Tensor, tokens: TokenGroups, out: Tensor) -> None: ...


class TableSlots:
    """Implements `LowRankSlots`."""

    max_rank: Final = None

    def __init__(self, setting: LowRankSetting, prepare: Prepare, new_table: Callable[[int], Table]) -> None:
        self._embeddings = {name for name, matrix in setting.matrices.items() if matrix.is_embedding}
        self._prepare = prepare
        self._tables: dict[str, Table] = {
            name: (TorchEmbeddingTable if name in self._embeddings else new_table)(setting.num_slots)
            for name in setting.matrices
        }

    def table(self, name: str) -> Table:
        return self._tables[name]

    def reserve(self) -> None:
        """An adapter brings its own memory."""

    def prepare(self, products: Mapping[str, Sequence[Product]]) -> Prepared:
        of_embeddings = {name: products[name] for name in self._embeddings & products.keys()}
        others = {name: each for name, each in products.items() if name not in self._embeddings}
        return {**of_embeddings, **self._prepare(others)}

    def group(self, owner: I64) -> TokenGroups | None:
        return TokenGroups.of(owner)

    def install(self, slot: int, prepared: Prepared) -> None:
        for name, table in self._tables.items():
            if name in prepared:
                table.install(slot, prepared[name])
            else:
                table.remove(slot)

    def remove(self, slot: int) -> None:
        for table in self._tables.values():
            table.remove(slot)

    def end(self, slots: Iterable[int]) -> None:
        """A step is over when it returns."""


class TorchLowRankTable:
    """Any dtype."""

    def __init__(self, num_slots: int) -> None:
        self._products: list[Sequence[Product]] = [() for _ in range(num_slots)]

    def install(self, slot: int, prepared: Sequence[Product]) -> None:
        self._products[slot] = prepared

    def remove(self, slot: int) -> None:
        self._products[slot] = ()

    def add(self, x: Tensor, tokens: TokenGroups, out: Tensor) -> None:
        """`out[mine, start : start + num_rows] += (x[mine] @ a.T) @ b.T` for each group and product of its slot."""
        for slot, mine in tokens.each():
            for a, b, start in self._products[slot]:
                out[:, start : start + len(b)].index_add_(0, mine, self._multiply(x[mine], a, b))

    def _multiply(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x @ a.T) @ b.T


class TorchEmbeddingTable(TorchLowRankTable):
    """The same where `x` are ids, whose columns of A are picked. A token has the same bits in any batch."""

    def _multiply(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([torch.mv(b, picked) for picked in a.T[x]])


def by_torch(setting: LowRankSetting) -> TableSlots:
    """Return the reference, of any dtype."""
    return TableSlots(setting, dict, TorchLowRankTable)
