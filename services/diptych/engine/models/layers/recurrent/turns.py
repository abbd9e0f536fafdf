"""How the requests of a step take their turns with their states: those with several tokens first, then the others.

So what is computed for a request does not depend on the others: operations on many requests at once are such that work
on each number alone, or add up numbers of one request, and rules for prompts see nobody else's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from diptych.common.arrays import I64
from diptych.engine.attention.staged_batch import StagedBatch, extend_starts
from diptych.kernels.slot_rows import SlotRows


class Recurrence(Protocol):
    """What mixes tokens with states. Sizes are those of `StateMixer.mix`. A slot of -1 is nobody's, on GPUs alone."""

    def step(self, projected: Tensor, state: tuple[Tensor, ...], rows: SlotRows, out: Tensor) -> None:
        """Mix the tokens of rows, `[num_tokens, ...]`: on CPUs each row has one.

        A row of nobody's reads and writes no state, and its result is anything.
        """
        ...

    def extend(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        """Mix the tokens of all requests that have several; what the rows of others become is anything."""
        ...


def take_turns(
    recurrence: Recurrence, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor
) -> None:
    """Implement `StateMixer.mix`. Nothing waits for the device."""
    rows, lens, starts = batch.state_rows, batch.host.extend_lens, extend_starts(batch.host)
    if (lens == 1).all():
        recurrence.step(projected, state, rows, out)
        return
    recurrence.extend(projected, state, batch, out)
    _step(recurrence, projected, state, rows, np.flatnonzero(lens == 1), starts, out)


def turns(state: Tensor, batch: StagedBatch) -> Iterator[tuple[slice, Tensor]]:
    """Give the tokens of each request that has several, and its state, which is kept when the next turn begins."""
    assert batch.state_slots is not None
    starts = extend_starts(batch.host)
    for i in np.flatnonzero(batch.host.extend_lens > 1).tolist():
        slot = batch.state_slots[i : i + 1]
        own = state[slot.clamp(min=0)]
        yield slice(int(starts[i]), int(starts[i + 1])), own[0]
        _write(state, slot, own)


def _write(part: Tensor, slot: Tensor, kept: Tensor) -> None:
    """Write what one request, `[1]`, keeps to its slot; nowhere if that is nobody's."""
    place = slot.clamp(min=0)
    is_somebodys = (slot >= 0).view(1, *[1] * (part.dim() - 1))
    part[place] = kept.where(is_somebodys, part[place])


def _step(
    recurrence: Recurrence,
    projected: Tensor,
    state: tuple[Tensor, ...],
    rows: SlotRows,
    requests: I64,
    starts: np.ndarray[tuple[int], np.dtype[np.int32]],
    out: Tensor,
) -> None:
    """Mix the only tokens of `requests`, which are among others: those of a row follow each other here, too."""
    if not len(requests):
        return
    tokens = torch.from_numpy(starts[requests].astype(np.int64)).to(out.device, non_blocking=True)
    mine = torch.from_numpy(requests).to(out.device, non_blocking=True)
    mixed = out.new_empty(len(requests), out.shape[1])
    recurrence.step(projected[tokens], state, SlotRows(rows.slots[mine], rows.lens[mine]), mixed)
    out[tokens] = mixed
