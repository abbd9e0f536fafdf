"""How the state of recurrent layers lies: in a slot layer by layer, in pages unit by unit. Pure.

A unit is what of all layers can't be divided among ranks: a key head of a delta rule with its value heads, a group of a
state space, some channels of a short convolution. Each rank has as many units as any other, one behind the other. So
what ranks of another number want is one run of bytes of what each rank has, wherever the parts of a layer lie in slots.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple

from diptych.architectures.config import ModelConfig
from diptych.architectures.recurrent import Recurrent, StatePart
from diptych.kvtransfer.layout import DTYPE_NBYTES, LINE_NBYTES, PoolLayout

STATE_ALIGNMENT: Final = 16  # bytes, of the parts of a state in a slot


class Slice(NamedTuple):
    """What the units of a process have of one section of a part: the queries of a convolution, for example."""

    slot_offset: int  # where that of the first unit begins in a layer of a slot, bytes; the others are behind it
    unit_offset: int  # where that of the first layer begins in a unit; the others are behind it
    nbytes: int  # of one unit, in one layer


def state_part_nbytes(part: StatePart, dtype: str) -> int:
    """Return the bytes of what one layer keeps in a slot; `dtype` is that of layers."""
    nbytes = math.prod(part.shape) * _cell_nbytes(part, dtype)
    return -(-nbytes // STATE_ALIGNMENT) * STATE_ALIGNMENT


def state_nbytes(recurrent: Recurrent, dtype: str) -> int:
    """Return the bytes of a slot, of all recurrent layers."""
    return len(recurrent.layers) * sum(state_part_nbytes(part, dtype) for part in recurrent.mixer.state_parts)


def slices(recurrent: Recurrent, dtype: str) -> tuple[Slice, ...]:
    """Return those of a process, in the order of slots."""
    parts, num_units = recurrent.mixer.state_parts, recurrent.mixer.num_units
    starts = accumulate((state_part_nbytes(part, dtype) for part in parts), initial=0)
    found: list[Slice] = []
    unit_offset = 0
    for part, start in zip(parts, starts, strict=False):
        row = math.prod(part.shape[1:]) * _cell_nbytes(part, dtype)
        slot_offset = start
        for section in part.sections:
            nbytes = section // num_units * row
            found.append(Slice(slot_offset, unit_offset, nbytes))
            slot_offset += section * row
            unit_offset += len(recurrent.layers) * nbytes
    return tuple(found)


def unit_nbytes(recurrent: Recurrent, dtype: str) -> int:
    """Return the bytes of a unit in pages: whole lines, so that a device moves any number of them."""
    nbytes = len(recurrent.layers) * sum(each.nbytes for each in slices(recurrent, dtype))
    return -(-nbytes // LINE_NBYTES) * LINE_NBYTES


def share_nbytes(recurrent: Recurrent, dtype: str) -> int:
    """Return the bytes of the units of a process in pages."""
    return recurrent.mixer.num_units * unit_nbytes(recurrent, dtype)


def with_states(layout: PoolLayout, model: ModelConfig, dtype: str) -> PoolLayout:
    """Return a pool whose pages also hold states; `model` is what this process computes, `dtype` that of its layers."""
    if model.recurrent is None:
        return layout
    return replace(layout, state_nbytes=layout.num_ranks * share_nbytes(model.recurrent, dtype))


def pages_per_state(model: ModelConfig, num_ranks: int, dtype: str, layout: PoolLayout) -> int:
    """Return how many pages hold a rank's part of a state; 0 for a model without. `dtype` is that of its layers."""
    if model.recurrent is None:
        return 0
    return -(-share_nbytes(model.recurrent.of_rank(num_ranks), dtype) // layout.page_nbytes)


def state_terms(dtype: str) -> str:
    """Return in words what must be equal, besides, where states are handed over: their bytes are never cast."""
    return f"by units, with {dtype}"


def _cell_nbytes(part: StatePart, dtype: str) -> int:
    return DTYPE_NBYTES["float32" if part.is_wide else dtype]
