"""Adds low-rank adapters to a model's matrices: for the tokens of each adapter in a batch, `out += (x @ A.T) @ B.T`.

Rule: a token without an adapter is not touched, so its result is the base model's to the bit, whatever else is in the
batch. It wraps any matrix, and knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from diptych.engine.batch import I64
from diptych.engine.lora.adapter import TARGETS, Adapter
from diptych.engine.models.ops import Matrix


class LowRank(Protocol):
    """One product, its weights in the layout that its processor likes."""

    def add(self, x: Tensor, tokens: Tensor, out: Tensor) -> None:
        """`out[tokens, start : start + num_rows] += (x[tokens] @ a.T) @ b.T`; `tokens` are ascending."""
        ...


NewLowRank = Callable[[Tensor, Tensor, int], LowRank]  # a [rank, num_columns], b [num_rows, rank], start

Products = Mapping[str, tuple[LowRank, ...]]  # an adapter's, by matrix


@dataclass(frozen=True, slots=True)
class Group:
    """The tokens of a step that one adapter changes."""

    slot: int
    tokens: Tensor  # [num_tokens], ascending: rows of what is multiplied


@dataclass(slots=True)
class _Step:
    """Who is in the batch. After the last attention only some tokens are computed: `late` counts among those."""

    tokens: list[Group] = field(default_factory=list)
    late: list[Group] = field(default_factory=list)


class LoraMatrix:
    """A matrix, and what the loaded adapters add to its products."""

    def __init__(self, base: Matrix, groups: list[Group], products: dict[int, tuple[LowRank, ...]]) -> None:
        self._base = base
        self._groups = groups  # of the running step
        self._products = products  # by slot

    def multiply(self, x: Tensor, out: Tensor) -> None:
        self._base.multiply(x, out)
        for group in self._groups:
            for product in self._products.get(group.slot, ()):
                product.add(x, group.tokens, out)

    def rows(self, ids: Tensor) -> Tensor:
        return self._base.rows(ids)


class Loras:
    """The adapters of one model, by slot.

    `prepare` may run in any thread, `install` and `remove` beside a step: no result that counts depends on their slot.
    """

    def __init__(self, num_layers: int, new_low_rank: NewLowRank, dtype: torch.dtype) -> None:
        self._late = {f"{num_layers - 1}.{name}" for name in ("o", "gate_up", "down")}
        self._new_low_rank = new_low_rank
        self._dtype = dtype
        self._step = _Step()
        self._products: dict[str, dict[int, tuple[LowRank, ...]]] = {}  # by matrix and slot

    def wrap(self, name: str, matrix: Matrix) -> Matrix:
        """Return what to multiply with in place of `matrix`."""
        if not TARGETS.fullmatch(name):
            return matrix
        groups = self._step.late if name in self._late else self._step.tokens
        return LoraMatrix(matrix, groups, self._products.setdefault(name, {}))

    def prepare(self, adapter: Adapter) -> Products:
        """Lay out the weights of an adapter."""
        products: dict[str, tuple[LowRank, ...]] = {}
        for product in adapter.products:
            a, b = (torch.from_numpy(np.ascontiguousarray(side)).to(self._dtype) for side in (product.a, product.b))
            low_rank = self._new_low_rank(a, b, product.start)
            products[product.target] = (*products.get(product.target, ()), low_rank)
        return products

    def install(self, slot: int, products: Products) -> None:
        for name, low_rank in products.items():
            self._products[name][slot] = low_rank

    def remove(self, slot: int) -> None:
        for products in self._products.values():
            products.pop(slot, None)

    def begin(self, adapters: I64 | None, extend_lens: I64, late_rows: I64) -> None:
        """Note the step's batch; `late_rows` are the tokens that are computed to the end."""
        if adapters is None:
            self._step.tokens.clear()
            self._step.late.clear()
            return
        owner = np.repeat(adapters, extend_lens)
        self._step.tokens[:] = _groups(owner)
        self._step.late[:] = _groups(owner[late_rows])


def _groups(owner: I64) -> list[Group]:
    slots = np.unique(owner[owner >= 0]).tolist()
    return [Group(slot, torch.from_numpy(np.flatnonzero(owner == slot))) for slot in slots]


class TorchLowRank:
    """Any dtype on any device."""

    def __init__(self, a: Tensor, b: Tensor, start: int) -> None:
        self._a, self._b = a, b
        self._rows = slice(start, start + len(b))

    def add(self, x: Tensor, tokens: Tensor, out: Tensor) -> None:
        out[:, self._rows].index_add_(0, tokens, (x[tokens] @ self._a.T) @ self._b.T)
