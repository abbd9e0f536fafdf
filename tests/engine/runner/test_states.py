"""States between slots and pages: what ranks of any number have in pages is, one behind the other, what one has."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.architectures.recurrent import DeltaNet, KimiDelta, Mamba2, Mixer, Recurrent, ShortConv, StatePart
from diptych.engine.runner.states import SlotStates, Units
from diptych.engine.values.batch import StateMoves
from diptych.engine.values.kv_regions import share_nbytes, state_nbytes, state_part_nbytes, unit_nbytes

LAYERS = (0, 2, 5)
MIXERS: dict[str, tuple[Mixer, int]] = {  # and ranks that can share its state
    "delta net": (DeltaNet(4, 8, 6, 10, 4), 4),
    "delta net, three value heads a key head": (DeltaNet(2, 6, 5, 3, 4), 2),
    "Kimi's delta rule": (KimiDelta(4, 6, 4), 4),
    "Mamba 2": (Mamba2(8, 3, 4, 5, 4, 0.0), 4),
    "short convolution": (ShortConv(64, 3), 4),
    "short convolution of odd blocks": (ShortConv(24, 4), 3),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("mixer", "num_ranks"), MIXERS.values(), ids=MIXERS)
def test_shares_of_ranks_are_runs_of_the_whole_and_come_back_as_they_were(
    mixer: Mixer, num_ranks: int, dtype: str
) -> None:
    whole = Recurrent(LAYERS, mixer)
    slots, nbytes = filled(whole, dtype), share_nbytes(whole, dtype)
    taken = Units(slots, whole, dtype).take(torch.tensor([2, 0]), nbytes + 40)
    assert not taken[:, nbytes:].any()
    assert nbytes == mixer.num_units * unit_nbytes(whole, dtype)
    of_ranks = []
    for rank in range(num_ranks):
        share = whole.of_rank(num_ranks)
        own = cut(slots, whole, share, rank, num_ranks, dtype)
        of_ranks.append(Units(own, share, dtype).take(torch.tensor([2, 0]), share_nbytes(share, dtype)))
        empty = torch.zeros_like(own)
        Units(empty, share, dtype).put(torch.tensor([1, 2]), of_ranks[-1])
        assert torch.equal(empty[1:], own[[2, 0]])
    assert torch.equal(torch.cat(of_ranks, dim=1), taken[:, :nbytes])


def test_states_go_to_pages_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts that end in one step together would take twice the bytes of all their states."""
    recurrent, counts, plain = Recurrent(LAYERS, MIXERS["delta net"][0]), list[int](), Units.take
    nbytes = share_nbytes(recurrent, "float32")
    kv = torch.zeros(2 * 19 + 1, nbytes // 2 + 8, dtype=torch.uint8)
    states = SlotStates(SimpleNamespace(recurrent=recurrent), kv, 20, "float32")  # type: ignore[arg-type]
    for number, part in enumerate(part for layer in LAYERS for part in states.of(layer)):
        part.copy_(torch.arange(part.numel()).view_as(part) + 1000 * number)
    slots, pages = np.arange(19)[::-1] + 1, np.random.default_rng(0).permutation(38).reshape(19, 2) + 1
    none = np.zeros(0, np.int64)
    moves: Any = StateMoves(none, none, none, np.zeros((0, 2), np.int32), slots.copy(), pages.astype(np.int32))

    def take(units: Units, slots: Tensor, nbytes: int) -> Tensor:
        counts.append(len(slots))
        return plain(units, slots, nbytes)

    monkeypatch.setattr(Units, "take", take)
    states.behind(SimpleNamespace(states=moves))  # type: ignore[arg-type]
    assert counts == [8, 8, 3]
    whole = plain(states._units, torch.from_numpy(slots.copy()), 2 * kv.shape[1])
    assert torch.equal(kv[pages.ravel()].view(19, -1), whole)
    assert not kv[0].any()


def filled(recurrent: Recurrent, dtype: str) -> Tensor:
    """Three slots whose parts hold random bytes, with zeros between parts."""
    slots = torch.zeros(3, state_nbytes(recurrent, dtype), dtype=torch.uint8)
    torch.manual_seed(0)
    for _, begin, end in places(recurrent, dtype):
        slots[:, begin:end] = torch.randint(0, 256, (3, end - begin), dtype=torch.uint8)
    return slots


def places(recurrent: Recurrent, dtype: str) -> list[tuple[StatePart, int, int]]:
    """Where each part of each layer lies in a slot, without what pads it."""
    found, begin = [], 0
    for _ in recurrent.layers:
        for part in recurrent.mixer.state_parts:
            size = 4 if part.is_wide or dtype == "float32" else 2
            found.append((part, begin, begin + math.prod(part.shape) * size))
            begin += state_part_nbytes(part, dtype)
    return found


def cut(slots: Tensor, whole: Recurrent, share: Recurrent, rank: int, num_ranks: int, dtype: str) -> Tensor:
    """The slots of a rank: of each section of each part, as many rows as of any other rank."""
    own = torch.zeros(3, state_nbytes(share, dtype), dtype=torch.uint8)
    for (part, begin, end), (_, to, stop) in zip(places(whole, dtype), places(share, dtype), strict=True):
        rows = slots[:, begin:end].view(3, part.shape[0], -1)
        sections = torch.split(rows, list(part.sections), dim=1)
        mine = [section.chunk(num_ranks, dim=1)[rank] for section in sections]
        own[:, to:stop] = torch.cat(mine, dim=1).reshape(3, -1)
    return own
