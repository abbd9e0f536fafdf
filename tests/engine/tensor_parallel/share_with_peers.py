"""One rank of `test_shared_experts`: `python share_with_peers.py RANK SIZE FOLDER REDUNDANT` prints what was wrong."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from diptych.engine.models.arithmetic.gpu_ops import GpuOps
from diptych.engine.models.arithmetic.ops import Experts
from diptych.engine.models.layers.spread_experts import ByPeers, Places, SpreadExperts
from diptych.engine.models.matrices.gpu_experts import GroupedExperts
from diptych.engine.models.ranks import ALONE
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.tensor_parallel.sharing.expert_group import ExpertGroup
from diptych.engine.values.rounds import Part, Round
from diptych.kernels.gpu.layers.moe import ExpertWeights

NUM_EXPERTS, CHOICES, WIDTH, INNER = 17, 4, 1024, 256
SIZES: Final = ((64, 64), (40, 0), (1, 7), (0, 3), (300, 123), (2048, 1), (5, 5))
RUNG: Final = 64
REPLAYS: Final = 100
DELAY_CYCLES: Final = 200_000
DTYPE: Final = torch.bfloat16
Tokens = tuple[Tensor, Tensor, Tensor]  # x, chosen, shares


class Rank:
    def __init__(self, rank: int, size: int, folder: str, num_redundant: int) -> None:
        self.rank, self.size, self.wrong = rank, size, Counter[str]()
        self.device = torch.device("cuda", rank)
        self.group = ExpertGroup(
            SharedExperts(folder, rank, size), 0, 1, self.device, DTYPE, num_redundant, counts=False, opens_memory=True
        )
        self.placement, room = self.group.placement(0, NUM_EXPERTS), self.group.room(NUM_EXPERTS)
        exchange = self.group.peers(WIDTH, CHOICES, room)
        assert exchange is not None, "the GPUs can't open each other's memory"
        made = torch.Generator().manual_seed(0)
        shapes = (2 * INNER, WIDTH), (WIDTH, INNER)
        self.weights = [
            [(torch.randn(shape, generator=made) / 16).to(self.device, DTYPE) for _ in range(NUM_EXPERTS)]
            for shape in shapes
        ]
        self.places = Places.of(self.placement, rank, self.device)
        peers = ByPeers(exchange, self.places.table(room))
        own = self.experts(self.placement.of_ranks[rank])
        self.spread = SpreadExperts(own, self.places, self.group, ALONE, 0, is_last=False, by_peers=peers)

    def experts(self, numbers: Sequence[int]) -> Experts:
        gate_up, down = (ExpertWeights.of([each[i] for i in numbers]) for each in self.weights)
        return GroupedExperts(gate_up, down, GpuOps.silu_and_mul)

    def tokens(self, seed: int, num_rows: int) -> Tokens:
        made = torch.Generator().manual_seed(seed)
        chosen = torch.rand(num_rows, NUM_EXPERTS, generator=made).topk(CHOICES).indices
        x, shares = (torch.randn(num_rows, size, generator=made) for size in (WIDTH, CHOICES))
        return x.to(self.device, DTYPE), chosen.to(self.device), shares.to(self.device, DTYPE)

    def of_one(self, all_tokens: Sequence[Tokens], bound: int) -> Tensor:
        """Return what one GPU that has all experts makes of this rank's tokens: rank by rank, as these add up."""
        x, shares = (torch.zeros(self.size * bound, n, dtype=DTYPE, device=self.device) for n in (WIDTH, CHOICES))
        ranks = torch.full((self.size * bound, CHOICES), -1, device=self.device)
        places = ranks.clone()
        for rank, (own_x, chosen, own_shares) in enumerate(all_tokens):
            rows = slice(rank * bound, rank * bound + len(own_x))
            x[rows], shares[rows] = own_x, own_shares
            ranks[rows], places[rows] = self.places.find(chosen)
        total = torch.zeros(x.shape, device=self.device)
        for rank, own in enumerate(self.placement.of_ranks):
            is_there = ranks == rank
            part = torch.empty_like(x)
            self.experts(own).forward(x, places.where(is_there, len(own)), shares.where(is_there, 0), part)
            total += part
        first = self.rank * bound
        return total[first : first + len(all_tokens[self.rank][0])].to(DTYPE)

    def compare(self, what: str, found: Tensor, all_tokens: Sequence[Tokens], bound: int) -> None:
        if not torch.equal(found, self.of_one(all_tokens, bound)):
            self.wrong[what] += 1

    def all_tokens(self, seed: int, sizes: Sequence[int]) -> list[Tokens]:
        return [self.tokens(seed * self.size + rank, count) for rank, count in enumerate(sizes)]

    def step_by_step(self) -> None:
        for seed, sizes in enumerate(SIZES):
            every = self.all_tokens(seed, sizes)
            self.group.begin(Round(tuple(Part(count, 0) for count in sizes)))
            out = torch.full_like(every[self.rank][0], torch.nan)
            self.spread.forward(*every[self.rank], out)
            self.compare(f"rows {sizes}", out, every, max(sizes))

    def in_a_graph(self) -> None:
        """Replay one step of `RUNG` rows for any number of them, none included, one rank now and then later."""
        x, chosen, shares = self.tokens(0, RUNG)
        out = torch.empty_like(x)
        self.group.round = None
        work = partial(self.spread.forward, x, chosen, shares, out)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        common, own = random.Random(1), random.Random(self.rank)
        for replay in range(REPLAYS):
            sizes = [common.choice((0, 1, 5, RUNG)) for _ in range(self.size)]
            every = self.all_tokens(1000 + replay, sizes)
            self.group.begin(Round(tuple(Part(count, count, True) for count in sizes)))
            for given, made in zip((x, chosen, shares), every[self.rank], strict=True):
                given[: len(made)].copy_(made)
            if own.random() < 0.2:
                torch.cuda._sleep(own.randrange(DELAY_CYCLES))
            graph.replay()
            self.compare("in a graph", out[: sizes[self.rank]], every, RUNG)
            if out[sizes[self.rank] :].any():
                self.wrong["nobody's rows"] += 1


def main(number: int, size: int, folder: str, num_redundant: int) -> None:
    torch.cuda.set_device(number)
    with torch.inference_mode():
        rank = Rank(number, size, folder, num_redundant)
        rank.step_by_step()
        rank.in_a_graph()
        torch.cuda.synchronize()
        rank.group.smallest(0)  # nobody leaves before all are done
    print(json.dumps(rank.wrong), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
