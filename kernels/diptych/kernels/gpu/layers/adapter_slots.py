"""Where adapters lie on a GPU: a slot of equal size for each, so that recorded launches find them at one address.

An adapter is one piece of memory, on the host and in its slot: its head, then the A and B of each part, dense, with
ranks filled up by zeros. So it is brought there by one copy, as large as the adapter itself; see `SlotMemory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.kernels.adapted_matrix import AdaptedMatrix, Product
from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.low_rank import (
    PART_NUMBERS,
    RANKS,
    Parts,
    SlotMemory,
    add_low_rank,
    add_picked,
    run_all_expands,
)
from diptych.kernels.token_tiles import FEW_TOKENS, I64, SMALL_TILE, TokenTiles

ALIGNMENT: Final = 16  # numbers
SIZES: Final = (SMALL_TILE, FEW_TOKENS + 1)  # of batches with small tiles, and with large ones


class AdapterSlots:
    """The slots of one model. One thread at a time may reserve and prepare; the rest is for the one that runs steps."""

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        matrices: Mapping[str, AdaptedMatrix],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_slots = num_slots
        self._matrices = matrices
        self.max_rank = cdiv(max_rank, RANKS) * RANKS  # of a part
        self._dtype = dtype
        self._device = device
        self._parts = dict(_parts(matrices))
        num_parts = sum(matrix.num_parts for matrix in matrices.values())
        self._head_size = _aligned(num_parts * PART_NUMBERS * 8 // dtype.itemsize)
        self._memory: SlotMemory | None = None
        self._copies: torch.cuda.Stream | None = None
        self._read: dict[int, torch.cuda.Event] = {}  # behind the last step that reads it, by slot

    @property
    def memory(self) -> SlotMemory:
        assert self._memory is not None, "not reserved"
        return self._memory

    def table(self, name: str) -> SlotTable | EmbeddingSlotTable:
        """Return what is added to the matrix `name`."""
        is_embedding = self._matrices[name].is_embedding
        return (EmbeddingSlotTable if is_embedding else SlotTable)(self, self._parts[name])

    def prepare(self, adapter: Mapping[str, Sequence[Product]]) -> Tensor:
        """Lay out an adapter in memory of the host, that GPUs read."""
        head, weights = self._laid_out(adapter)
        size = max((at + len(numbers) for at, numbers in weights), default=self._head_size)
        packed = torch.zeros(size, dtype=self._dtype, pin_memory=self._device.type == "cuda")
        packed[: self._head_size].view(torch.int64)[: head.numel()] = head.flatten()
        for at, numbers in weights:
            packed[at : at + len(numbers)] = numbers
        return packed

    def reserve(self) -> None:
        """Allocate the slots, and have the kernels compiled, so that no request waits for it; once.

        Raises `torch.OutOfMemoryError` where the GPU has no room for them.
        """
        if self._memory is not None:
            return
        memory = torch.zeros(self._num_slots, self._slot_size, dtype=self._dtype, device=self._device)
        self._memory = SlotMemory(memory, self.max_rank)
        for num_tokens in SIZES if self._device.type == "cuda" else ():
            self._run_all(num_tokens)

    def group(self, owner: I64) -> TokenTiles | None:
        """Return the tokens of these slots on the GPU, at once."""
        return TokenTiles.of(owner, self._num_slots, self._device) if (owner >= 0).any() else None

    def install(self, slot: int, packed: Tensor) -> None:
        """Bring an adapter into a slot, behind the steps that read it and before those that are queued from now on.

        The copy has a stream of its own, so it runs beside a step of others that is queued already.
        """
        place = self.memory.memory[slot, : len(packed)]
        if self._device.type != "cuda":
            place.copy_(packed)
            return
        now = torch.cuda.current_stream(self._device)
        copies = self._copies = self._copies or torch.cuda.Stream(self._device)
        copies.wait_event(self._read.pop(slot) if slot in self._read else now.record_event())
        with torch.cuda.stream(copies):
            place.copy_(packed, non_blocking=True)
        now.wait_stream(copies)

    def end(self, slots: Iterable[int]) -> None:
        """Note that all that reads these slots is queued."""
        if self._device.type == "cuda":
            event = torch.cuda.current_stream(self._device).record_event()
            self._read.update(dict.fromkeys(slots, event))

    def remove(self, slot: int) -> None:
        """Nobody reads a slot that no token has."""

    @property
    def _slot_size(self) -> int:
        numbers = (self.max_rank * (p.num_parts * p.num_columns + p.num_rows) for p in self._matrices.values())
        return _aligned(self._head_size + sum(map(_aligned, numbers)))

    def _laid_out(self, adapter: Mapping[str, Sequence[Product]]) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return the head, and weights by where they begin."""
        end, weights = self._head_size, list[tuple[int, Tensor]]()
        head = torch.zeros(sum(matrix.num_parts for matrix in self._matrices.values()), PART_NUMBERS, dtype=torch.int64)
        for name, products in adapter.items():
            matrix, parts = self._matrices[name], self._parts[name]
            assert len(products) <= parts.count, (name, len(products))
            for part, (a, b, start) in enumerate(products, parts.first):
                a, b = _filled_up(a, 0), _filled_up(b, 1)
                assert len(a) <= self.max_rank, (name, a.shape)
                head[part] = torch.tensor([end, end + a.numel(), len(a), start, len(b)])
                weights += [(end, (a.T if matrix.is_embedding else a).flatten()), (end + a.numel(), b.flatten())]
                end += a.numel() + b.numel()
        return head, weights

    def _run_all(self, num_tokens: int) -> None:
        """Run every variant of the kernels on an empty slot: which programs see, and end."""
        there = TokenTiles.of(np.zeros(num_tokens, np.int64), self._num_slots, self._device)
        for matrix, name in {matrix: name for name, matrix in self._matrices.items()}.items():
            out = torch.zeros(num_tokens, matrix.num_rows, dtype=self._dtype, device=self._device)
            x = there.tokens.long() * 0 if matrix.is_embedding else out.new_zeros(num_tokens, matrix.num_columns)
            self.table(name).add(x, there, out)
            run_all_expands(there, self.memory, self._parts[name], out)


class SlotTable:
    """What adapters add to the products of one matrix."""

    def __init__(self, slots: AdapterSlots, parts: Parts) -> None:
        self._slots = slots
        self._parts = parts

    def add(self, x: Tensor, tokens: TokenTiles, out: Tensor) -> None:
        """See `add_low_rank`."""
        add_low_rank(x, tokens, self._slots.memory, self._parts, out)


class EmbeddingSlotTable(SlotTable):
    """What they add to what is looked up."""

    def add(self, x: Tensor, tokens: TokenTiles, out: Tensor) -> None:
        """See `add_picked`; `x` are ids."""
        add_picked(x, tokens, self._slots.memory, self._parts, out)


def _parts(matrices: Mapping[str, AdaptedMatrix]) -> Iterator[tuple[str, Parts]]:
    first = 0
    for name, matrix in matrices.items():
        is_aligned = all(number % ALIGNMENT == 0 for part in matrix.parts for number in part)
        yield name, Parts(first, matrix.num_parts, max(size for _, size in matrix.parts), is_aligned)
        first += matrix.num_parts


def _filled_up(side: Tensor, dim: int) -> Tensor:
    """Return it with zeros for ranks up to a multiple of `RANKS`."""
    missing = -side.shape[dim] % RANKS
    shape = list(side.shape)
    shape[dim] = missing
    return torch.cat([side, side.new_zeros(shape)], dim) if missing else side


def _aligned(size: int) -> int:
    return cdiv(size, ALIGNMENT) * ALIGNMENT
