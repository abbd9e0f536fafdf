"""Tokens on their way to experts and back. One process plays all ranks, as in `test_one_shot.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpu_cases import on_gpu
from kernel_device import let_ranges_end_at_numbers_of_run_time, with_gpu
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from diptych.kernels.expert_places import ExpertTable, Received
from diptych.kernels.gpu.collectives.expert_exchange import COMBINE, ExchangeShape, ExpertExchange, Form

EXPERTS, CHOICES, SIZE, MOST = 5, 3, 24, 704
FEW = Form(2, 4)  # programs: each has several tokens
Tokens = tuple[Tensor, Tensor, Tensor]  # x, chosen, shares
OF_RANKS = {2: ((0, 2, 4), (1, 3, 4)), 3: ((0, 4), (1, 3), (2, 4))}  # one is on two of them


class Ranks:
    def __init__(self, size: int, device: torch.device, combine: Form = FEW, max_polls: int = 1) -> None:
        self.device = device
        self.size = size
        self.of_ranks = OF_RANKS[size]
        self.room = len(self.of_ranks[0])
        shape = ExchangeShape(size, self.room, CHOICES, SIZE, itemsize=4, max_tokens=MOST)
        memory = [torch.zeros(shape.memory_nbytes, dtype=torch.uint8, device=device) for _ in range(size)]
        addresses = [each.data_ptr() for each in memory]
        self.ends = [
            ExpertExchange(rank, shape, memory[rank], addresses, combine=combine, max_polls=max_polls, traps=False)
            for rank in range(size)
        ]
        self.table = self._table()

    def _table(self) -> ExpertTable:
        places = torch.full((EXPERTS, 2), -7, dtype=torch.int32)
        num_copies = torch.zeros(EXPERTS, dtype=torch.int32)
        for rank, own in enumerate(self.of_ranks):
            for place, expert in enumerate(own):
                places[expert, num_copies[expert]] = rank * self.room + place
                num_copies[expert] += 1
        return ExpertTable(places.to(self.device), num_copies.to(self.device))

    def call(self, call: Callable[[int], object]) -> None:
        """Have each rank make its call, those who were early once more, backwards."""
        order = list(range(self.size))
        early = []
        for rank in (*order, *order[-2::-1]):
            before = int(self.ends[rank].late)
            call(rank)
            if int(self.ends[rank].late) > before:
                early.append(rank)
        assert early == order[:-1]

    def tokens(self, num_rows: int) -> Tokens:
        """The first of them is for experts 0 and 2 alone, which the first of two ranks has."""
        chosen = torch.rand(num_rows, EXPERTS, device=self.device).topk(CHOICES).indices
        chosen[:1] = torch.tensor([0, 2, 2], device=self.device)
        x, shares = (torch.randn(num_rows, size, device=self.device) for size in (SIZE, CHOICES))
        return x, chosen, shares

    def dispatch(self, mine: list[Tokens], counts: list[int], bound: int, before: int = 0) -> list[Received]:
        received: dict[int, Received] = {}

        def call(rank: int) -> None:
            count = torch.tensor([counts[rank] + before], dtype=torch.int32, device=self.device)
            received[rank] = self.ends[rank].dispatch(*mine[rank], self.table, count, bound, before)

        self.call(call)
        return [received[rank] for rank in range(self.size)]

    def results(self, rank: int, received: Received) -> Tensor:
        """What stands for experts: number e multiplies by e + 1. Rows without a token are not to be read."""
        own = torch.tensor([*self.of_ranks[rank], 0], device=self.device)
        is_ours = received.chosen < self.room
        factors = ((own[received.chosen.long()] + 1) * received.shares).where(is_ours, 0).sum(1, keepdim=True)
        return torch.where(is_ours.any(1, keepdim=True), received.x * factors, torch.nan)


@pytest.mark.parametrize(
    ("counts", "bound", "combine"),
    [
        ((3, 0), 3, COMBINE),
        ((1, 2, 1), 2, FEW),
        ((9, 5), 10, Form(2, 4, segment=1)),
        ((10, 9), 11, Form(2, 4, rows=2, segment=2)),
        on_gpu((700, 512), 700, COMBINE),
        on_gpu((699, 511), 699, Form(16, 8, segment=4)),
        on_gpu((699, 512), 701, Form(16, 8, rows=2, segment=4)),
    ],
)
def test_every_token_comes_back_with_the_sum_of_its_experts_step_after_step(
    counts: tuple[int, ...], bound: int, combine: Form, device: torch.device
) -> None:
    """Rows behind the tokens are nobody's: numbers that are none stand there. A larger step follows a smaller one."""
    ranks = Ranks(len(counts), device, combine)
    for room in (bound, min(bound + 3, MOST)):
        mine = [ranks.tokens(room) for _ in counts]
        for (x, _, _), count in zip(mine, counts, strict=True):
            x[count:] = torch.nan
        received = ranks.dispatch(mine, list(counts), room)
        results = [ranks.results(rank, each) for rank, each in enumerate(received)]
        outs = [torch.full((room, SIZE), torch.nan, device=device) for _ in counts]
        ranks.call(partial(combine_one, ranks, results, received, outs))
        for (x, chosen, shares), out, count in zip(mine, outs, counts, strict=True):
            expected = x * ((chosen + 1) * shares).sum(1, keepdim=True)
            torch.testing.assert_close(out[:count], expected[:count])
            assert (out[count:] == 0).all()


def combine_one(ranks: Ranks, results: list[Tensor], received: list[Received], outs: list[Tensor], rank: int) -> None:
    ranks.ends[rank].combine(results[rank], received[rank], outs[rank])


def test_a_token_is_sent_to_the_ranks_of_its_experts_alone(device: torch.device) -> None:
    ranks = Ranks(2, device)
    mine = [ranks.tokens(1), ranks.tokens(1)]
    received = ranks.dispatch(mine, [1, 1], 1)
    assert torch.equal(received[0].x, torch.cat([mine[0][0], mine[1][0]]))
    assert [each.asked.tolist() for each in received] == [[1], [1]]
    assert (received[1].x == 0).all()  # as the memory was
    assert (received[1].chosen == ranks.room).all()  # nobody's
    assert (received[1].shares == 0).all()


def test_copies_of_an_expert_take_turns_and_of_a_part_of_the_rows_as_many_are_tokens_as_are_left(
    device: torch.device,
) -> None:
    ranks = Ranks(2, device)
    mine = [ranks.tokens(4), ranks.tokens(4)]
    for _, chosen, _ in mine:
        chosen[:] = 4
    received = ranks.dispatch(mine, [3, 0], 4, before=5)
    assert received[0].asked.tolist() == [1, 2, 1, 0]  # rank 0, rank 1, ...
    assert received[1].asked.tolist() == [0] * 4


@with_gpu  # polls are counted in the interpreter
def test_who_has_waited_in_vain_for_a_segment_does_not_wait_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank does not come: with minutes for each segment nobody would hear of it for hours."""
    let_ranges_end_at_numbers_of_run_time(monkeypatch)
    polls, bound, segments = 50, 10, 5
    ranks = Ranks(2, torch.device("cpu"), Form(2, 4, segment=1), max_polls=polls)
    received = ranks.dispatch([ranks.tokens(bound) for _ in range(2)], [bound] * 2, bound)
    count, atomic = 0, interpreter_builder.create_atomic_rmw

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return atomic(*arguments)

    monkeypatch.setattr(interpreter_builder, "create_atomic_rmw", counted)
    ranks.ends[0].combine(ranks.results(0, received[0]), received[0], torch.empty(bound, SIZE))
    waits = polls + segments  # each looks once
    assert count == FEW.programs * (waits + segments + 1)  # told, and in the end counted as late
