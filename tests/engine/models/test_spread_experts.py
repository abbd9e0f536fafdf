"""Experts of several ranks, threads here, each with tokens of its own: results are those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from thread_ranks import Meeting, on_threads
from torch import Tensor

from diptych.engine.models.arithmetic.ops import ExpertsInTurn, TorchOps
from diptych.engine.models.layers import spread_experts
from diptych.engine.models.layers.spread_experts import Places, SpreadExperts
from diptych.engine.models.matrices.matrix import TorchMatrix
from diptych.engine.models.ranks import ALONE
from diptych.engine.values.expert_placement import ExpertPlacement, balanced, in_order
from diptych.engine.values.rounds import Part, Round

NUM_EXPERTS, CHOSEN, WIDTH, INNER = 6, 3, 16, 8
TOKENS = (5, 0, 11)  # of each rank


@dataclass
class ThreadRanks:
    """Implements `ExpertRanks` for a thread."""

    rank: int
    meeting: Meeting
    placed: ExpertPlacement
    round: Round | None
    counted: list[int] = field(default_factory=lambda: [0] * NUM_EXPERTS)
    size: int = len(TOKENS)

    def placement(self, layer: int, num_experts: int) -> ExpertPlacement:
        return self.placed

    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        return self.placed.of_ranks[self.rank]

    def smallest(self, number: int) -> int:
        return min(map(int, self.meeting.exchange(self.rank, torch.tensor(number))))

    def count(self, layer: int, chosen: Tensor) -> None:
        for expert in chosen.flatten().tolist():
            self.counted[expert] += 1

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, part))

    def num_sent_to_us(self, num_sent: Sequence[int]) -> list[int]:
        return [int(each[self.rank]) for each in self.meeting.exchange(self.rank, torch.tensor(num_sent))]

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        sizes = self.meeting.exchange(self.rank, torch.tensor(num_sent))
        parts = self.meeting.exchange(self.rank, rows)
        got = [torch.split(part, size.tolist())[self.rank] for part, size in zip(parts, sizes, strict=True)]
        assert [len(each) for each in got] == list(num_received)
        return torch.cat(got)


def experts_of(numbers: Sequence[int]) -> ExpertsInTurn:
    made = torch.Generator().manual_seed(0)
    ups = [torch.randn(2 * INNER, WIDTH, generator=made) for _ in range(NUM_EXPERTS)]
    downs = [torch.randn(WIDTH, INNER, generator=made) for _ in range(NUM_EXPERTS)]
    ops = TorchOps(torch.float32)
    gate_up, down = ([TorchMatrix(each[i]) for i in numbers] for each in (ups, downs))
    return ExpertsInTurn(gate_up, down, (2 * INNER, INNER), ops.silu_and_mul)


def tokens_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 + rank)
    chosen = torch.rand(TOKENS[rank], NUM_EXPERTS, generator=made).topk(CHOSEN).indices
    return torch.randn(TOKENS[rank], WIDTH, generator=made), chosen, torch.rand(TOKENS[rank], CHOSEN, generator=made)


def computed(placement: ExpertPlacement, common: Round | None, rank: int, meeting: Meeting) -> tuple[Tensor, list[int]]:
    ranks = ThreadRanks(rank, meeting, placement, common)
    places = Places.of(placement, rank, torch.device("cpu"))
    spread = SpreadExperts(experts_of(ranks.own(0, NUM_EXPERTS)), places, ranks, ALONE, 0, is_last=False)
    x, chosen, shares = tokens_of(rank)
    out = torch.full_like(x, torch.nan)
    spread.forward(x, chosen, shares, out)
    return out, ranks.counted


@pytest.mark.parametrize(
    "placement",
    [in_order(NUM_EXPERTS, len(TOKENS)), balanced([9, 1, 1, 1, 1, 1], len(TOKENS), 3), balanced([1] * 6, 3, 12)],
    ids=["in order", "redundant", "all on all"],
)
def test_each_rank_gets_for_its_tokens_what_one_process_computes_in_both_forms(
    placement: ExpertPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = Round(tuple(Part(number, 0) for number in TOKENS))
    padded = on_threads(len(TOKENS), partial(computed, placement, common))
    monkeypatch.setattr(spread_experts, "PADDED_ROWS", 10)
    counted = on_threads(len(TOKENS), partial(computed, placement, common))
    unknown = on_threads(len(TOKENS), partial(computed, placement, None))
    for rank in range(len(TOKENS)):
        x, chosen, shares = tokens_of(rank)
        expected = torch.empty_like(x)
        experts_of(range(NUM_EXPERTS)).forward(x, chosen, shares, expected)
        torch.testing.assert_close(padded[rank][0], expected)
        assert torch.equal(padded[rank][0], counted[rank][0])
        assert torch.equal(padded[rank][0], unknown[rank][0])
        assert padded[rank][1] == torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS).tolist()
