"""A KV pool in host memory whose slots hold marks instead of keys and values.

Each layer's K and V of a slot begin with the token's mark, hidden by a mask of that layer and kind, as four numbers of
the pool's type: pages may be cut anew and cast on their way to a peer, as those of a real model. The rest is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class MarkedPages:
    """Over `memory`, which must outlive it."""

    def __init__(self, memory: memoryview, layout: PoolLayout) -> None:
        """Raise `ConfigError` where a slot is too narrow for a mark."""
        region = layout.sole_region
        if region.num_heads * region.head_dim < MARK_LEN:
            raise ConfigError(f"--device sim needs {MARK_LEN} KV values a token and layer: {layout}")
        self._codes = _codes()[layout.dtype]
        self._numbers = _numbers(self._codes)
        pool = np.frombuffer(memory, self._codes.dtype)[: layout.nbytes // self._codes.itemsize]
        shape = (layout.num_pages, layout.num_layers, region.num_planes, layout.page_size)
        self._rows = pool.reshape(*shape, -1)[..., :MARK_LEN]
        rows = np.arange(layout.num_layers * region.num_planes, dtype=np.uint64) * np.uint64(_MASK_STEP)
        self._masks: U32 = (rows.astype(np.uint32) & MARK).reshape(layout.num_layers, region.num_planes)
        self.num_layers = layout.num_layers

    def write(self, layer: int, slots: I64, marks: U32) -> None:
        """Leave marks in one layer of slots."""
        pages, offsets = np.divmod(slots, self._rows.shape[3])
        numbers = (marks[:, None] ^ self._masks[layer]).view(np.uint8).reshape(-1, self._masks.shape[1], MARK_LEN)
        self._rows[pages, layer, :, offsets] = self._codes[numbers]

    def read(self, pages: I32, seq_len: int) -> U64:
        """Return what is seen of a request's tokens: their marks, and above them how many layers say otherwise."""
        num_pages = -(-seq_len // self._rows.shape[3])
        raw = self._rows[pages[:num_pages]]  # `take` would copy the whole pool first
        numbers = self._numbers.take(_keys(raw)).view(np.uint32)[..., 0]  # [num_pages, num_layers, planes, page_size]
        found = (numbers ^ self._masks[..., None]).transpose(0, 3, 1, 2).reshape(-1, self._masks.size)[:seq_len]
        wrong: U64 = (found != found[:, :1]).sum(axis=1, dtype=np.uint64)
        return wrong << np.uint64(32) | found[:, 0]


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
