"""Experts of several ranks, threads here, each with tokens of its own: results are those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from thread_experts import ThreadExperts, ThreadPeers
from thread_ranks import Meeting, on_threads
from torch import Tensor

from diptych.engine.models.arithmetic.ops import ExpertsInTurn, TorchOps
from diptych.engine.models.layers import spread_experts
from diptych.engine.models.layers.spread_experts import ByPeers, Places, SpreadExperts
from diptych.engine.models.matrices.matrix import TorchMatrix
from diptych.engine.models.ranks import ALONE
from diptych.engine.values.expert_placement import ExpertPlacement, balanced, in_order
from diptych.engine.values.rounds import Part, Round

NUM_EXPERTS, CHOSEN, WIDTH, INNER = 6, 3, 16, 8
TOKENS = (5, 0, 11)  # of each rank


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


def computed(
    placement: ExpertPlacement,
    common: Round | None,
    num_behind: int,
    by_kernels: bool,
    rank: int,
    meeting: Meeting,
) -> tuple[Tensor, list[int]]:
    """Behind the tokens come rows that are nobody's."""
    ranks = ThreadExperts(rank, meeting, placement)
    places = Places.of(placement, rank, torch.device("cpu"))
    if common is not None:
        ranks.begin(common)
    room = ranks.room(NUM_EXPERTS)
    peers = ByPeers(ThreadPeers(rank, meeting, room, 64), places.table(room)) if by_kernels else None
    own = experts_of(ranks.own(0, NUM_EXPERTS))
    spread = SpreadExperts(own, places, ranks, ALONE, 0, is_last=False, by_peers=peers)
    x, chosen, shares = (torch.cat([each, each.new_zeros(num_behind, each.shape[1])]) for each in tokens_of(rank))
    out = torch.full_like(x, torch.nan)
    spread.forward(x, chosen, shares, out)
    assert (out[TOKENS[rank] :] == 0).all()
    return out[: TOKENS[rank]], ranks.counted


@pytest.mark.parametrize("num_behind", [0, 3])
@pytest.mark.parametrize(
    "placement",
    [in_order(NUM_EXPERTS, len(TOKENS)), balanced([9, 1, 1, 1, 1, 1], len(TOKENS), 3), balanced([1] * 6, 3, 12)],
    ids=["in order", "redundant", "all on all"],
)
def test_each_rank_gets_for_its_tokens_what_one_process_computes_in_all_forms(
    placement: ExpertPlacement, num_behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = Round(tuple(Part(number, 0) for number in TOKENS))
    padded = on_threads(len(TOKENS), partial(computed, placement, common, num_behind, False))
    by_peers = on_threads(len(TOKENS), partial(computed, placement, common, num_behind, True))
    monkeypatch.setattr(spread_experts, "PADDED_ROWS", 10)
    counted = on_threads(len(TOKENS), partial(computed, placement, common, num_behind, False))
    for rank in range(len(TOKENS)):
        x, chosen, shares = tokens_of(rank)
        expected = torch.empty_like(x)
        experts_of(range(NUM_EXPERTS)).forward(x, chosen, shares, expected)
        torch.testing.assert_close(padded[rank][0], expected)
        assert torch.equal(padded[rank][0], counted[rank][0])
        torch.testing.assert_close(by_peers[rank][0], expected)
        assert num_behind or torch.equal(padded[rank][0], by_peers[rank][0])  # else experts get other rows, too
        assert padded[rank][1][: chosen.numel()] == chosen.flatten().tolist()


def test_before_the_first_round_rows_are_as_many_as_there_are() -> None:
    placement = in_order(NUM_EXPERTS, len(TOKENS))
    common = Round(tuple(Part(number, 0) for number in TOKENS))
    padded, unknown = (on_threads(len(TOKENS), partial(computed, placement, each, 0, False)) for each in (common, None))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(padded, unknown, strict=True))
