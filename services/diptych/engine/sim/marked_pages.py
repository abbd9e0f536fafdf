"""A KV pool in host memory whose slots hold marks instead of keys and values.

What a slot holds of each layer, its keys and its values, begins with the token's mark, hidden by a mask of that layer
and kind, as four numbers of the pool's type: pages may be cut anew and cast on their way to a peer, as those of a real
model. The rest is not used. Every region of a page is marked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from diptych.common.arrays import I32, I64, U64
from diptych.common.errors import ConfigError
from diptych.engine.sim.answers import MARK, U32
from diptych.kvtransfer.layout import PoolLayout

U8 = npt.NDArray[np.uint8]

MARK_LEN: Final = 4  # numbers
NO_NUMBER: Final = 0xFF  # what else is found in a pool

_MASK_STEP: Final = 0x9E3779B1


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is marked of one region."""

    numbers: npt.NDArray[Any]  # [num_pages, num_layers, num_planes, page_size, MARK_LEN], in the memory of the pool
    masks: U32  # [num_layers, num_planes]
    places: Mapping[int, int]  # by layer of the model


class MarkedPages:
    """Over `memory`, which must outlive it."""

    def __init__(self, memory: memoryview, layout: PoolLayout) -> None:
        """Raise `ConfigError` where a slot is too narrow for a mark."""
        if any(region.num_heads * region.head_dim < MARK_LEN for region in layout.regions):
            raise ConfigError(f"--device sim needs {MARK_LEN} KV values a token and layer: {layout}")
        self._codes = _codes()[layout.dtype]
        self._numbers = _numbers(self._codes)
        pool = np.frombuffer(memory, self._codes.dtype)[: layout.nbytes // self._codes.itemsize]
        self._page_size = layout.page_size
        self._regions = tuple(_rows(pool.reshape(layout.num_pages, -1), layout))
        self.num_layers = layout.num_layers

    def write(self, layer: int, slots: I64, marks: U32) -> None:
        """Leave marks in one layer of slots."""
        pages, offsets = np.divmod(slots, self._page_size)
        for region in self._regions:
            if (place := region.places.get(layer)) is not None:
                hidden = marks[:, None] ^ region.masks[place]
                numbers = hidden.view(np.uint8).reshape(-1, region.masks.shape[1], MARK_LEN)
                region.numbers[pages, place, :, offsets] = self._codes[numbers]

    def read(self, pages: I32, seq_len: int) -> U64:
        """Return what is seen of a request's tokens: their marks, and above them how many layers say otherwise."""
        needed = pages[: -(-seq_len // self._page_size)]
        found: U32 = np.concatenate([self._found(region, needed, seq_len) for region in self._regions], axis=1)
        wrong: U64 = (found != found[:, :1]).sum(axis=1, dtype=np.uint64)
        seen: U64 = wrong << np.uint64(32) | found[:, 0]
        return seen

    def _found(self, region: _Rows, pages: I32, seq_len: int) -> U32:
        """Return the marks that a region has of each token, `[seq_len, num_layers * num_planes]`."""
        raw = region.numbers[pages]  # `take` would copy the whole pool first
        numbers = self._numbers.take(_keys(raw)).view(np.uint32)[..., 0]  # [num_pages, num_layers, planes, page_size]
        found: U32 = (numbers ^ region.masks[..., None]).transpose(0, 3, 1, 2).reshape(-1, region.masks.size)[:seq_len]
        return found


def _rows(pool: npt.NDArray[Any], layout: PoolLayout) -> Iterator[_Rows]:
    """Yield those of each region of `pool`, `[num_pages, numbers of a page]`. No two rows have the same mask."""
    start = first_row = 0
    for region in layout.regions:
        shape = region.shape(layout.page_size)
        cells, num_rows = math.prod(shape), len(region.layers) * region.num_planes
        numbers = pool[:, start : start + cells].reshape(-1, *shape[:3], shape[3] * shape[4])[..., :MARK_LEN]
        rows = np.arange(first_row, first_row + num_rows, dtype=np.uint64) * np.uint64(_MASK_STEP)
        masks = (rows.astype(np.uint32) & MARK).reshape(shape[:2])
        yield _Rows(numbers, masks, {layer: place for place, layer in enumerate(region.layers)})
        start, first_row = start + cells, first_row + num_rows


def _codes() -> Mapping[str, npt.NDArray[Any]]:
    """Return how each type of KV writes the numbers from 0 to 15."""
    numbers = np.arange(16, dtype=np.float32)
    bits = numbers.view(np.uint32)
    fp8 = np.where(numbers > 0, (bits >> 20) - (120 << 3), 0)  # three bits of mantissa; the exponent's bias is 7
    return {
        "float32": bits,
        "bfloat16": (bits >> 16).astype(np.uint16),
        "float16": numbers.astype(np.float16).view(np.uint16),
        "fp8_e4m3": fp8.astype(np.uint8),
    }


def _numbers(codes: npt.NDArray[Any]) -> U8:
    """Return the table from `_keys` to numbers."""
    numbers = np.full(1 << 8 * min(codes.itemsize, 2), NO_NUMBER, np.uint8)
    numbers[_keys(codes)] = np.arange(16)
    return numbers


def _keys(raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What is looked up: the value itself, or the upper half of four bytes, whose lower half must be empty."""
    return np.where(raw & 0xFFFF, 0xFFFF, raw >> 16) if raw.itemsize == 4 else raw
