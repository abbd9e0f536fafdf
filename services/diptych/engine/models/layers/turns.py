"""How the requests of a step take their turns with their states: those with one token all at once, others one by one.

So what is computed for a request does not depend on the others: operations on many requests at once are such that work
on each number alone, or add up numbers of one request, and those on a prompt see nobody else's.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from diptych.common.arrays import I64
from diptych.engine.attention.staged_batch import StagedBatch, extend_starts


class Recurrence(Protocol):
    """What mixes tokens with states. Sizes are those of `StateMixer.mix`. A slot of -1 is nobody's, on GPUs alone."""

    def step(self, projected: Tensor, state: tuple[Tensor, ...], slots: Tensor, out: Tensor) -> None:
        """Mix one token of each of several requests, `[num_requests, ...]`, with the states in their `slots`.

        A row of nobody's reads and writes no state, and its result is anything.
        """
        ...

    def extend(self, projected: Tensor, state: tuple[Tensor, ...], out: Tensor) -> None:
        """Mix several tokens of one request; `state` is its own, without a dimension of slots, and kept in place."""
        ...


def take_turns(
    recurrence: Recurrence, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor
) -> None:
    """Implement `StateMixer.mix`. Nothing waits for the device."""
    assert batch.state_slots is not None
    lens, starts = batch.host.extend_lens, extend_starts(batch.host)
    if (lens == 1).all():
        recurrence.step(projected, state, batch.state_slots, out)
        return
    _step(recurrence, projected, state, batch.state_slots, np.flatnonzero(lens == 1), starts, out)
    for i in np.flatnonzero(lens > 1).tolist():
        slot, tokens = batch.state_slots[i : i + 1], slice(int(starts[i]), int(starts[i + 1]))
        own = tuple(part[slot.clamp(min=0)] for part in state)
        recurrence.extend(projected[tokens], tuple(part[0] for part in own), out[tokens])
        for part, kept in zip(state, own, strict=True):
            _write(part, slot, kept)


def _write(part: Tensor, slot: Tensor, kept: Tensor) -> None:
    """Write what one request, `[1]`, keeps to its slot; nowhere if that is nobody's."""
    place = slot.clamp(min=0)
    is_somebodys = (slot >= 0).view(1, *[1] * (part.dim() - 1))
    part[place] = kept.where(is_somebodys, part[place])


def _step(
    recurrence: Recurrence,
    projected: Tensor,
    state: tuple[Tensor, ...],
    slots: Tensor,
    requests: I64,
    starts: np.ndarray[tuple[int], np.dtype[np.int32]],
    out: Tensor,
) -> None:
    """Mix the only tokens of `requests`, which are among others."""
    if not len(requests):
        return
    tokens = torch.from_numpy(starts[requests].astype(np.int64)).to(out.device, non_blocking=True)
    mine = torch.from_numpy(requests).to(out.device, non_blocking=True)
    mixed = out.new_empty(len(requests), out.shape[1])
    recurrence.step(projected[tokens], state, slots[mine], mixed)
    out[tokens] = mixed
