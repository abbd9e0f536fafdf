"""Adds low-rank adapters to a model's matrices: for the tokens of each adapter in a batch, `out += (x @ A.T) @ B.T`.

Rule: a token without an adapter is not touched, so its product is that of the matrix below to the bit, whatever else is
in the batch. It wraps any matrix, and knows no family.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from diptych.architectures.placement import Placed
from diptych.common.arrays import I64
from diptych.common.errors import InvalidRequest, Overloaded
from diptych.engine.lora.registry import EMBEDDING, OUTPUT, TARGETS, WITHOUT_ADAPTERS, Adapter, InvalidAdapter
from diptych.engine.models.matrices.matrix import Matrix
from diptych.kernels.adapted_matrix import AdaptedMatrix, Product

# matrices that come after the last attention, in the last layer
LATE: Final = ("o", "gate_up", "down", "shared.gate_up", "shared.down")

Prepared = Any  # an adapter's weights, as its `LowRankSlots` want them
Tokens = Any  # the tokens of a step by slot, as its `LowRankSlots` want them


class LowRankTable(Protocol):
    """What the adapters add to one matrix."""

    def add(self, x: Tensor, tokens: Tokens, out: Tensor) -> None:
        """Add to each token's row of `out` what its adapter makes of its row of `x`; of an embedding, of its id."""
        ...


class LowRankSlots(Protocol):
    """The adapters of a model by slot, as one kind of processor keeps and multiplies them."""

    @property
    def max_rank(self) -> int | None:
        """The highest rank that there is room for; None: any."""
        ...

    def table(self, name: str) -> LowRankTable:
        """Return what is added to the matrix `name`."""
        ...

    def reserve(self) -> None:
        """Take the memory of the slots, unless it is taken. Raises `torch.OutOfMemoryError`."""
        ...

    def prepare(self, products: Mapping[str, Sequence[Product]]) -> Prepared:
        """Lay out an adapter, given by matrix, on the host; slots are reserved. In any thread."""
        ...

    def group(self, owner: I64) -> Tokens | None:
        """Return the tokens of these slots, -1 for none, as tables want them; None if there is no slot."""
        ...

    def install(self, slot: int, prepared: Prepared) -> None:
        """Put an adapter into a slot: between two steps."""
        ...

    def remove(self, slot: int) -> None: ...

    def end(self, slots: Iterable[int]) -> None:
        """Note that a step with adapters in these slots is queued."""
        ...


@dataclass(frozen=True, slots=True)
class LowRankSetting:
    """What adapters there may be, and of what."""

    num_slots: int
    max_rank: int  # on GPUs
    matrices: Mapping[str, AdaptedMatrix]
    dtype: torch.dtype
    device: torch.device


LowRankKernels = Callable[[LowRankSetting], LowRankSlots]


@dataclass(slots=True)
class _Current:
    """Who is in the running step."""

    tokens: Tokens | None = None


class LoraMatrix:
    """A matrix, and what the loaded adapters add to its products."""

    def __init__(self, base: Matrix, current: _Current, table: LowRankTable) -> None:
        self.base = base
        self._current = current
        self._table = table

    @property
    def is_adapted(self) -> bool:
        """Whether anybody in the running step has an adapter: if not, it is `base` that is multiplied with."""
        return self._current.tokens is not None

    def multiply(self, x: Tensor, out: Tensor) -> None:
        self.base.multiply(x, out)
        if self._current.tokens is not None:
            self._table.add(x, self._current.tokens, out)

    def rows(self, ids: Tensor) -> Tensor:
        return self.base.rows(ids)


class LoraEmbedding:
    """An embedding, and what the loaded adapters add to what is looked up in it."""

    def __init__(self, base: Matrix, current: _Current, table: LowRankTable) -> None:
        self._base = base
        self._current = current
        self._table = table

    def multiply(self, x: Tensor, out: Tensor) -> None:
        self._base.multiply(x, out)

    def rows(self, ids: Tensor) -> Tensor:
        found = self._base.rows(ids)
        if self._current.tokens is not None:
            self._table.add(ids, self._current.tokens, found)
        return found


class Loras:
    """The adapters of one model, by slot. Changes wait for the next step: one that runs keeps what it reads.

    `prepare` may run in any thread, `install` and `remove` in another one than `begin` and the model.
    """

    def __init__(self, late_layer: int | None, setting: LowRankSetting, kernels: LowRankKernels) -> None:
        """`late_layer`: behind whose attention only tokens with logits are computed; None: in a stage behind ours."""
        self._late_names = {OUTPUT, *(f"{late_layer}.{name}" for name in LATE)}
        self._setting = setting
        self._slots = kernels(setting) if setting.num_slots else None
        self._all, self._late = _Current(), _Current()
        self._changes: deque[Callable[[], None]] = deque()

    def wrap(self, name: str, matrix: Matrix) -> Matrix:
        """Return what to multiply with in place of `matrix`."""
        if self._slots is None or name not in self._setting.matrices:
            return matrix
        wrapper = LoraEmbedding if self._setting.matrices[name].is_embedding else LoraMatrix
        return wrapper(matrix, self._late if name in self._late_names else self._all, self._slots.table(name))

    def reserve(self) -> None:
        """Take the memory of the slots, unless it is taken. Raises `Overloaded`."""
        assert self._slots is not None
        try:
            self._slots.reserve()
        except torch.OutOfMemoryError as error:
            words = f"no GPU memory is left for {self._setting.num_slots} adapters of rank {self._setting.max_rank}"
            raise Overloaded(f"{words}: lower --max-loras, --max-lora-rank or --gpu-memory-share") from error

    def prepare(self, adapter: Adapter) -> Prepared:
        """Lay out the weights of an adapter. One thread at a time. Raises as `reserve`, or where it is not served."""
        if self._slots is None:
            raise InvalidRequest(WITHOUT_ADAPTERS)
        _check_rank(adapter, self._slots.max_rank)
        self.reserve()
        products: dict[str, list[Product]] = {}
        for product in adapter.products:
            a, b = (
                torch.from_numpy(np.ascontiguousarray(side)).to(self._setting.dtype) for side in (product.a, product.b)
            )
            products.setdefault(product.target, []).append((a, b, product.start))
        return self._slots.prepare(products)

    def install(self, slot: int, prepared: Prepared) -> None:
        assert self._slots is not None
        slots = self._slots
        self._changes.append(lambda: slots.install(slot, prepared))

    def remove(self, slot: int) -> None:
        assert self._slots is not None
        slots = self._slots
        self._changes.append(lambda: slots.remove(slot))

    def begin(self, adapters: I64 | None, extend_lens: I64, late_rows: I64) -> None:
        """Note the step's batch; `late_rows` are the tokens that are computed to the end."""
        self.change()
        if adapters is None or self._slots is None:
            return self.begin_staged(None, None)
        owner = np.repeat(adapters, extend_lens)
        self.begin_staged(self._slots.group(owner), self._slots.group(owner[late_rows]))

    def change(self) -> None:
        """Install and remove what was said to be, on the current stream. Not while a graph is captured."""
        while self._changes:
            self._changes.popleft()()

    def begin_staged(self, tokens: Tokens | None, late_tokens: Tokens | None) -> None:
        """Note the tokens of a step, as tables want them: all, and those that are computed to the end."""
        self._all.tokens, self._late.tokens = tokens, late_tokens

    def end(self, adapters: I64 | None) -> None:
        """Note that the step is queued."""
        if adapters is not None and self._slots is not None:
            self._slots.end(slot for slot in np.unique(adapters).tolist() if slot >= 0)


def _check_rank(adapter: Adapter, max_rank: int | None) -> None:
    rank = max((len(product.a) for product in adapter.products), default=0)
    if max_rank is not None and rank > max_rank:
        words = f"it has rank {rank}, more than the {max_rank} that this worker has room for"
        raise InvalidAdapter(f"{words}: give --max-lora-rank {rank}")


def adapted_matrices(placement: Iterable[Placed]) -> dict[str, AdaptedMatrix]:
    """Return the matrices among these that adapters may change, by name: see `adapted_placement`."""
    parts: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    columns: dict[str, int] = {}
    for _, pieces in placement:
        for piece in pieces:
            if TARGETS.fullmatch(piece.target):
                num_rows, num_columns = piece.shape
                is_embedding = piece.target == EMBEDDING
                parts[piece.target].append((0, num_columns) if is_embedding else (piece.start, num_rows))
                columns[piece.target] = num_rows if is_embedding else num_columns
    return {
        name: AdaptedMatrix(columns[name], tuple(sorted(each)), is_embedding=name == EMBEDDING)
        for name, each in parts.items()
    }
