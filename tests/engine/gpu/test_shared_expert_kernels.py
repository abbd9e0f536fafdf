"""Experts of two ranks, threads here, by GPUs' kernels in the interpreter: the bits of one that adds up as they do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from thread_experts import ThreadExperts
from thread_ranks import Meeting, on_threads
from torch import Tensor

from diptych.engine.models.arithmetic.ops import Experts
from diptych.engine.models.layers.spread_experts import ByPeers, Places, SpreadExperts
from diptych.engine.models.ranks import ALONE
from diptych.engine.values.expert_placement import balanced
from diptych.engine.values.rounds import Part, Round
from diptych.kernels.expert_places import Received

pytestmark = pytest.mark.integration  # the interpreter, as a parameter of its own

NUM_EXPERTS, CHOICES, WIDTH, INNER, MOST = 5, 2, 32, 16, 8
SIZES = ((3, 2), (0, 4), (1, 0))
PLACEMENT = balanced([3, 1, 1, 1, 1], 2, 1)  # one expert is on both ranks


@dataclass
class InTurns:
    """Implements `PeerExchange` by kernels of which one runs at a time: who was early calls again."""

    exchange: Any
    lock: threading.Lock
    most_rows: int = MOST

    def dispatch(self, *given: Any) -> Received:
        found: Received = self._until_met(lambda: self.exchange.dispatch(*given))
        return found

    def combine(self, *given: Any) -> None:
        self._until_met(lambda: self.exchange.combine(*given))

    def _until_met(self, call: Any) -> Any:
        while True:
            with self.lock:
                before, found = int(self.exchange.late), call()
                if int(self.exchange.late) == before:
                    return found


@dataclass
class Locked:
    """Implements `Experts`."""

    experts: Experts
    lock: threading.Lock

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        with self.lock:
            self.experts.forward(x, chosen, shares, out)


def experts_of(numbers: Sequence[int]) -> Experts:
    from diptych.engine.models.arithmetic.gpu_ops import GpuOps
    from diptych.engine.models.matrices.gpu_experts import GroupedExperts
    from diptych.kernels.gpu.layers.moe import ExpertWeights

    made = torch.Generator().manual_seed(0)
    ups, downs = (
        [torch.randn(shape, generator=made) for _ in range(NUM_EXPERTS)]
        for shape in ((2 * INNER, WIDTH), (WIDTH, INNER))
    )
    gate_up, down = (ExpertWeights.of([each[i] for i in numbers]) for each in (ups, downs))
    return GroupedExperts(gate_up, down, GpuOps.silu_and_mul)


def tokens(seed: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    chosen = torch.rand(num_rows, NUM_EXPERTS, generator=made).topk(CHOICES).indices
    return torch.randn(num_rows, WIDTH, generator=made), chosen, torch.rand(num_rows, CHOICES, generator=made)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what is activated of places without a token is any number
@pytest.mark.parametrize("device", ["cpu"], indirect=True, ids=["interpreter"])
def test_rows_come_back_with_what_one_process_computes(device: torch.device) -> None:
    """Also where a rank has none, and where there are rows behind the tokens, which are nobody's."""
    from diptych.kernels.gpu.collectives.expert_exchange import ExchangeShape, ExpertExchange, Form

    room = max(map(len, PLACEMENT.of_ranks))
    shape = ExchangeShape(2, room, CHOICES, WIDTH, 4, MOST)
    memory = [torch.zeros(shape.memory_nbytes, dtype=torch.uint8) for _ in range(2)]
    lock, form = threading.Lock(), Form(2, 4)

    def run(rank: int, meeting: Meeting) -> list[Tensor]:
        addresses = [each.data_ptr() for each in memory]
        kept: Any = {"dispatch": form, "combine": form, "max_polls": 1, "traps": False}
        exchange = InTurns(ExpertExchange(rank, shape, memory[rank], addresses, **kept), lock)
        ranks, places = ThreadExperts(rank, meeting, PLACEMENT), Places.of(PLACEMENT, rank, device)
        own = Locked(experts_of(PLACEMENT.of_ranks[rank]), lock)
        peers = ByPeers(exchange, places.table(room))
        spread = SpreadExperts(own, places, ranks, ALONE, 0, is_last=False, by_peers=peers)
        found = []
        for seed, sizes in enumerate(SIZES):
            ranks.begin(Round(tuple(Part(count, 0) for count in sizes)))
            x, chosen, shares = tokens(10 * seed + rank, sizes[rank] + seed)
            out = torch.full_like(x, torch.nan)
            spread.forward(x, chosen, shares, out)
            assert not out[sizes[rank] :].any()
            found.append(out[: sizes[rank]])
        return found

    results = on_threads(2, run)
    for seed, sizes in enumerate(SIZES):
        every = [[each[: sizes[rank]] for each in tokens(10 * seed + rank, sizes[rank] + seed)] for rank in range(2)]
        for rank, wanted in enumerate(rank_by_rank(every, max(sizes))):
            x, chosen, shares = every[rank]
            expected = torch.empty_like(x)
            experts_of(range(NUM_EXPERTS)).forward(x, chosen, shares, expected)
            torch.testing.assert_close(results[rank][seed], expected)
            assert torch.equal(results[rank][seed], wanted)


def rank_by_rank(every: Sequence[Sequence[Tensor]], bound: int) -> list[Tensor]:
    """Return what one process makes of the tokens of both that adds up in the same order: each rank's experts alone."""
    places_of = Places.of(PLACEMENT, 0, torch.device("cpu"))
    x, shares = (torch.zeros(2 * bound, size) for size in (WIDTH, CHOICES))
    ranks = torch.full((2 * bound, CHOICES), -1)
    places = ranks.clone()
    for rank, (own_x, chosen, own_shares) in enumerate(every):
        rows = slice(rank * bound, rank * bound + len(own_x))
        x[rows], shares[rows] = own_x, own_shares
        ranks[rows], places[rows] = places_of.find(chosen)
    total = torch.zeros_like(x)
    for rank, own in enumerate(PLACEMENT.of_ranks):
        is_there, part = ranks == rank, torch.empty_like(x)
        experts_of(own).forward(x, places.where(is_there, len(own)), shares.where(is_there, 0), part)
        total += part
    return [total[rank * bound : rank * bound + len(each[0])] for rank, each in enumerate(every)]
