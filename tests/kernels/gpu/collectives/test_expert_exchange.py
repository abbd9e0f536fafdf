"""Tokens on their way to experts and back. One process plays all ranks, as in `test_one_shot.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from gpu_cases import on_gpu
from torch import Tensor

from diptych.kernels.gpu.collectives import expert_exchange
from diptych.kernels.gpu.collectives.expert_exchange import ExchangeShape, ExpertExchange, Received

EXPERTS, CHOICES, SIZE, ROOM = 5, 3, 24, 700
Tokens = tuple[Tensor, Tensor, Tensor]  # x, chosen, shares


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter runs one after the other."""
    if device.type == "cpu":
        monkeypatch.setattr(expert_exchange, "PROGRAMS", 2)


class Ranks:
    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        self.size = size
        shape = ExchangeShape(size, EXPERTS, CHOICES, SIZE, itemsize=4, max_tokens=ROOM)
        memory = [torch.zeros(shape.memory_nbytes, dtype=torch.uint8, device=device) for _ in range(size)]
        addresses = [each.data_ptr() for each in memory]
        self.ends = [
            ExpertExchange(rank, shape, memory[rank], addresses, max_polls=1, traps=False) for rank in range(size)
        ]

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

    def tokens(self, num_tokens: int) -> Tokens:
        """The first of them is for experts 0 and 1 alone, which the first of two ranks has."""
        chosen = torch.rand(num_tokens, EXPERTS, device=self.device).topk(CHOICES).indices.to(torch.int32)
        chosen[:1] = torch.tensor([0, 1, 1], device=self.device)
        x, shares = (torch.randn(num_tokens, size, device=self.device) for size in (SIZE, CHOICES))
        return x, chosen, shares

    def dispatch(self, mine: list[Tokens], bound: int) -> list[Received]:
        received: dict[int, Received] = {}

        def call(rank: int) -> None:
            received[rank] = self.ends[rank].dispatch(*mine[rank], bound)

        self.call(call)
        return [received[rank] for rank in range(self.size)]

    def results(self, rank: int, received: Received) -> Tensor:
        """What stands for experts: number e multiplies by e + 1. Rows without a token are not to be read."""
        first, end = rank * EXPERTS // self.size, (rank + 1) * EXPERTS // self.size
        is_ours = received.chosen < end - first
        factors = ((first + received.chosen + 1) * received.shares).where(is_ours, 0).sum(1, keepdim=True)
        return torch.where(is_ours.any(1, keepdim=True), received.x * factors, torch.nan)


@pytest.mark.parametrize(("counts", "bound"), [((3, 0), 3), ((1, 2, 1), 2), on_gpu((700, 512), 700)])
def test_every_token_comes_back_with_the_sum_of_its_experts_step_after_step(
    counts: tuple[int, ...], bound: int, device: torch.device
) -> None:
    ranks = Ranks(len(counts), device)
    for _ in range(2):
        mine = [ranks.tokens(count) for count in counts]
        received = ranks.dispatch(mine, bound)
        results = [ranks.results(rank, each) for rank, each in enumerate(received)]
        outs = [torch.empty(count, SIZE, device=device) for count in counts]
        ranks.call(partial(combine, ranks, results, received, mine, outs))
        for (x, chosen, shares), out in zip(mine, outs, strict=True):
            torch.testing.assert_close(out, x * ((chosen + 1) * shares).sum(1, keepdim=True))


def combine(
    ranks: Ranks, results: list[Tensor], received: list[Received], mine: list[Tokens], outs: list[Tensor], rank: int
) -> None:
    ranks.ends[rank].combine(results[rank], received[rank], mine[rank][1], outs[rank])


def test_a_token_is_sent_to_the_ranks_of_its_experts_alone(device: torch.device) -> None:
    ranks = Ranks(2, device)
    mine = [ranks.tokens(1), ranks.tokens(1)]
    received = ranks.dispatch(mine, 1)
    assert torch.equal(received[0].x, torch.cat([mine[0][0], mine[1][0]]))
    assert (received[1].x == 0).all()  # as the memory was
    assert (received[1].chosen == 3).all()  # of three experts, nobody's
    assert (received[1].shares == 0).all()
