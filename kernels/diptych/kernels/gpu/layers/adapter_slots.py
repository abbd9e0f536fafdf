"""Where adapters lie on a GPU: a slot of equal size for each, so that recorded launches find them at one address.

An adapter is one piece of memory, on the host and in its slot: its head, then the A and B of each part, dense, with
ranks filled up by zeros. So it is brought there by one copy, as large as the adapter itself; see `SlotMemory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv
from diptych.kernels.gpu.layers.low_rank import PART_NUMBERS, RANKS, Parts, SlotMemory, add_low_rank, add_picked
from diptych.kernels.token_tiles import LARGE_TILE, SMALL_TILE, TokenTiles, tile_tokens

ALIGNMENT: Final = 16  # numbers
FIRST_TOKENS: Final = (SMALL_TILE, 5 * LARGE_TILE)  # of batches that have small tiles, and large ones

Product = tuple[Tensor, Tensor, int]  # a [rank, num_columns], b [num_rows, rank], first column of the result


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix that adapters change, by parts: an adapter has a product for each, or for none."""

    num_columns: int
    parts: tuple[tuple[int, int], ...]  # first row and rows of each, ascending
    is_embedding: bool = False  # its columns are picked, and A is kept transposed

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    @property
    def num_rows(self) -> int:
        return sum(self.parts[-1])


class AdapterSlots:
    """The slots of one model. One thread at a time may prepare; the others' calls are of the thread that runs steps."""

    def __init__(
        self, num_slots: int, max_rank: int, places: Mapping[str, Place], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_slots = num_slots
        self._places = places
        self._max_rank = cdiv(max_rank, RANKS) * RANKS
        self._dtype = dtype
        self._device = device
        self._parts = dict(_parts(places))
        num_parts = sum(place.num_parts for place in places.values())
        self._head_size = _aligned(num_parts * PART_NUMBERS * 8 // dtype.itemsize)
        self._memory: SlotMemory | None = None

    @property
    def slot_nbytes(self) -> int:
        """What a slot takes: an adapter of the highest rank on all places."""
        return self._slot_size * self._dtype.itemsize

    @property
    def memory(self) -> SlotMemory:
        assert self._memory is not None, "no adapter was prepared"
        return self._memory

    def table(self, name: str) -> SlotTable | EmbeddingSlotTable:
        """Return what is added to the matrix `name`."""
        is_embedding = self._places[name].is_embedding
        return (EmbeddingSlotTable if is_embedding else SlotTable)(self, self._parts[name])

    def prepare(self, adapter: Mapping[str, Sequence[Product]]) -> Tensor:
        """Lay out an adapter in memory of the host, that GPUs read; the first one has the slots allocated.

        Raises `torch.OutOfMemoryError` where the GPU has no room for them.
        """
        if self._memory is None:
            self.reserve()
        head, weights = self._laid_out(adapter)
        size = max((at + len(numbers) for at, numbers in weights), default=self._head_size)
        packed = torch.zeros(size, dtype=self._dtype, pin_memory=self._device.type == "cuda")
        packed[: self._head_size].view(torch.int64)[: head.numel()] = head.flatten()
        for at, numbers in weights:
            packed[at : at + len(numbers)] = numbers
        return packed

    def reserve(self) -> None:
        """Allocate the slots, and have the kernels compiled, so that no request waits for it."""
        memory = torch.zeros(self._num_slots, self._slot_size, dtype=self._dtype, device=self._device)
        self._memory = SlotMemory(memory, self._max_rank)
        for num_tokens in FIRST_TOKENS:
            self._run_all(num_tokens)

    def install(self, slot: int, packed: Tensor) -> None:
        """Bring an adapter into a slot, behind the steps that are queued."""
        self.memory.memory[slot, : len(packed)].copy_(packed, non_blocking=True)

    def remove(self, slot: int) -> None:
        """Nobody reads a slot that no token has."""

    @property
    def _slot_size(self) -> int:
        numbers = (self._max_rank * (p.num_parts * p.num_columns + p.num_rows) for p in self._places.values())
        return _aligned(self._head_size + sum(map(_aligned, numbers)))

    def _laid_out(self, adapter: Mapping[str, Sequence[Product]]) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return the head, and weights by where they begin."""
        end, weights = self._head_size, list[tuple[int, Tensor]]()
        head = torch.zeros(sum(place.num_parts for place in self._places.values()), PART_NUMBERS, dtype=torch.int64)
        for name, products in adapter.items():
            place, parts = self._places[name], self._parts[name]
            assert len(products) <= parts.count, (name, len(products))
            for part, (a, b, start) in enumerate(products, parts.first):
                a, b = _filled_up(a, 0), _filled_up(b, 1)
                assert len(a) <= self._max_rank, (name, a.shape)
                head[part] = torch.tensor([end, end + a.numel(), len(a), start, len(b)])
                weights += [(end, (a.T if place.is_embedding else a).flatten()), (end + a.numel(), b.flatten())]
                end += a.numel() + b.numel()
        return head, weights

    def _run_all(self, num_tokens: int) -> None:
        """Run every kernel on an empty slot: which programs see, and end."""
        tokens, tiles = tile_tokens(torch.zeros(num_tokens, dtype=torch.int64).numpy(), self._num_slots)
        there = TokenTiles(*(torch.from_numpy(each).to(self._device) for each in (tokens, tiles)))
        for name, place in self._places.items():
            out = torch.zeros(num_tokens, place.num_rows, dtype=self._dtype, device=self._device)
            if place.is_embedding:
                self.table(name).add(torch.zeros_like(there.tokens, dtype=torch.int64), there, out)
            else:
                self.table(name).add(out.new_zeros(num_tokens, place.num_columns), there, out)


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


def _parts(places: Mapping[str, Place]) -> Iterator[tuple[str, Parts]]:
    first = 0
    for name, place in places.items():
        is_aligned = all(number % ALIGNMENT == 0 for part in place.parts for number in part)
        yield name, Parts(first, place.num_parts, max(size for _, size in place.parts), is_aligned)
        first += place.num_parts


def _filled_up(side: Tensor, dim: int) -> Tensor:
    """Return it with zeros for ranks up to a multiple of `RANKS`."""
    missing = -side.shape[dim] % RANKS
    shape = list(side.shape)
    shape[dim] = missing
    return torch.cat([side, side.new_zeros(shape)], dim) if missing else side


def _aligned(size: int) -> int:
    return cdiv(size, ALIGNMENT) * ALIGNMENT
