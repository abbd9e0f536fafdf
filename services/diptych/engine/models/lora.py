"""Adds low-rank adapters to a model's matrices: for the tokens of each adapter in a batch, `out += (x @ A.T) @ B.T`.

Rule: a token without an adapter is not touched, so its product is that of the matrix below to the bit, whatever else is
in the batch. It wraps any matrix, and knows no family.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from diptych.common.arrays import I64
from diptych.engine.lora.registry import TARGETS, Adapter
from diptych.engine.models.matrix import Matrix
from diptych.kernels.token_groups import TokenGroups

LATE: Final = ("o", "gate_up", "down")  # matrices that come after the last attention, in the last layer

Product = tuple[Tensor, Tensor, int]  # a [rank, num_columns], b [num_rows, rank], first column of the result
Prepared = Mapping[str, Any]  # an adapter's weights by matrix, as its `LowRankKernels` want them


class LowRankTable(Protocol):
    """What the adapters add to one matrix, by slot."""

    def install(self, slot: int, prepared: Any) -> None: ...

    def remove(self, slot: int) -> None: ...

    def add(self, x: Tensor, groups: TokenGroups, out: Tensor) -> None:
        """`out[tokens, start : start + num_rows] += (x[tokens] @ a.T) @ b.T` for each group and product of its slot."""
        ...


@dataclass(frozen=True, slots=True)
class LowRankKernels:
    """How one processor computes it."""

    prepare: Callable[[Mapping[str, Sequence[Product]]], Prepared]  # lay out an adapter; in any thread
    new_table: Callable[[int], LowRankTable]  # number of slots


@dataclass(slots=True)
class _Current:
    """Who is in the running step."""

    groups: TokenGroups | None = None


class LoraMatrix:
    """A matrix, and what the loaded adapters add to its products."""

    def __init__(self, base: Matrix, current: _Current, table: LowRankTable) -> None:
        self.base = base
        self._current = current
        self._table = table

    @property
    def is_adapted(self) -> bool:
        """Whether anybody in the running step has an adapter: if not, it is `base` that is multiplied with."""
        return self._current.groups is not None

    def multiply(self, x: Tensor, out: Tensor) -> None:
        self.base.multiply(x, out)
        if self._current.groups is not None:
            self._table.add(x, self._current.groups, out)

    def rows(self, ids: Tensor) -> Tensor:
        return self.base.rows(ids)


class Loras:
    """The adapters of one model, by slot. Changes wait for the next step: one that runs keeps what it reads.

    `prepare` may run in any thread, `install` and `remove` in another one than `begin` and the model.
    """

    def __init__(
        self, num_layers: int, num_slots: int, kernels: LowRankKernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._late_names = {f"{num_layers - 1}.{name}" for name in LATE}
        self._num_slots = num_slots
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._all, self._late = _Current(), _Current()
        self._tables: dict[str, LowRankTable] = {}  # by matrix
        self._changes: deque[Callable[[], None]] = deque()

    def wrap(self, name: str, matrix: Matrix) -> Matrix:
        """Return what to multiply with in place of `matrix`."""
        if not TARGETS.fullmatch(name) or not self._num_slots:
            return matrix
        table = self._tables.setdefault(name, self._kernels.new_table(self._num_slots))
        return LoraMatrix(matrix, self._late if name in self._late_names else self._all, table)

    def prepare(self, adapter: Adapter) -> Prepared:
        """Lay out the weights of an adapter."""
        products: dict[str, list[Product]] = {}
        for product in adapter.products:
            a, b = (
                torch.from_numpy(np.ascontiguousarray(side)).to(self._device, self._dtype)
                for side in (product.a, product.b)
            )
            products.setdefault(product.target, []).append((a, b, product.start))
        return self._kernels.prepare(products)

    def install(self, slot: int, prepared: Prepared) -> None:
        self._changes.append(lambda: self._install(slot, prepared))

    def remove(self, slot: int) -> None:
        self._changes.append(lambda: self._remove(slot))

    def begin(self, adapters: I64 | None, extend_lens: I64, late_rows: I64) -> None:
        """Note the step's batch; `late_rows` are the tokens that are computed to the end."""
        while self._changes:
            self._changes.popleft()()
        if adapters is None:
            self._all.groups = self._late.groups = None
            return
        owner = np.repeat(adapters, extend_lens)
        self._all.groups, self._late.groups = self._groups(owner), self._groups(owner[late_rows])

    def _groups(self, owner: I64) -> TokenGroups | None:
        """A GPU gets them once a step: were they copied for each matrix, each would wait for the one before."""
        groups = TokenGroups.of(owner)
        return None if groups is None else groups.on(self._device)

    def _install(self, slot: int, prepared: Prepared) -> None:
        for name, each in prepared.items():
            self._tables[name].install(slot, each)

    def _remove(self, slot: int) -> None:
        for table in self._tables.values():
            table.remove(slot)


class TorchLowRankTable:
    """Any dtype on any device."""

    def __init__(self, num_slots: int) -> None:
        self._products: list[Sequence[Product]] = [() for _ in range(num_slots)]

    def install(self, slot: int, prepared: Sequence[Product]) -> None:
        self._products[slot] = prepared

    def remove(self, slot: int) -> None:
        self._products[slot] = ()

    def add(self, x: Tensor, groups: TokenGroups, out: Tensor) -> None:
        offsets = groups.offsets.tolist()
        for slot, first, last in zip(groups.slots.tolist(), offsets[:-1], offsets[1:], strict=True):
            tokens = groups.tokens[first:last]
            for a, b, start in self._products[slot]:
                out[:, start : start + len(b)].index_add_(0, tokens, (x[tokens] @ a.T) @ b.T)


TORCH: Final = LowRankKernels(prepare=dict, new_table=TorchLowRankTable)
