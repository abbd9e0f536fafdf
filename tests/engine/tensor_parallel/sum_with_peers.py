"""One rank of `test_peer_sums`: `python sum_with_peers.py RANK SIZE STORE` prints what was wrong, as JSON."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from diptych.engine.tensor_parallel.communicator import TorchCommunicator
from diptych.engine.tensor_parallel.meeting import FileMeeting
from diptych.engine.tensor_parallel.peer_sums import PeerSums, open_peer_sums
from diptych.kernels.gpu.collectives.one_shot import reference_sum
from diptych.kernels.gpu.layers.norms import add_rms_norm

SHAPES: Final = ((1, 4096), (2, 4096), (3, 2880), (8, 4096), (17, 7168), (32, 4096), (64, 8192), (128, 4096), (1, 8192))
CALLS: Final = 1000
REPLAYS: Final = 100
MAX_POLLS: Final = 50_000_000  # some ten seconds
DELAY_CYCLES: Final = 200_000


class Rank:
    def __init__(self, rank: int, size: int, store: Path) -> None:
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.communicator = TorchCommunicator(rank, size, FileMeeting(store), self.device)
        opened = open_peer_sums(self.communicator, self.device, max_polls=MAX_POLLS)
        assert opened is not None, "the GPUs can't open each other's memory"
        self.sums: PeerSums = opened
        self.wrong = Counter[str]()

    def parts(self, seed: int, num_tokens: int, size: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """Return what every rank brings: each rank makes the numbers of all."""
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(num_tokens, size, generator=generator) for _ in range(self.communicator.size)]
        return [each.to(self.device, dtype) for each in made]

    def compare(self, what: str, found: Tensor, expected: Tensor) -> None:
        if not torch.equal(found, expected):
            self.wrong[what] += 1

    def beside_nccl(self) -> None:
        """Two numbers have one sum, whoever makes it."""
        for seed, shape in enumerate(SHAPES):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                parts = self.parts(seed, *shape, dtype)
                ours, theirs = (parts[self.communicator.rank].clone() for _ in range(2))
                if not self.sums.has(ours):
                    continue
                self.sums.one_shot.sum(ours)
                torch.distributed.all_reduce(theirs)
                self.compare(f"{shape} {dtype}, reference", ours, reference_sum(parts))
                if self.communicator.size == 2:
                    self.compare(f"{shape} {dtype}, NCCL", ours, theirs)

    def in_a_row(self, delay: Callable[[], None]) -> None:
        """Queue calls without a wait between, of all sizes; look at all results afterwards."""
        brought = [self.parts(seed, *shape) for seed, shape in enumerate(SHAPES)]
        order = random.Random(1)
        results = []
        for _ in range(CALLS):
            which = order.randrange(len(SHAPES))
            mine = brought[which][self.communicator.rank].clone()
            delay()
            self.sums.one_shot.sum(mine)
            results.append((which, mine))
        expected = [reference_sum(parts) for parts in brought]
        for which, found in results:
            self.compare(f"{SHAPES[which]} in a row", found, expected[which])

    def norms(self) -> None:
        for seed, (num_tokens, size) in enumerate(SHAPES):
            parts, (stream, weights, *_) = self.parts(seed, num_tokens, size), self.parts(seed + 50, num_tokens, size)
            expected, weight = stream.clone(), weights[0].clone()
            normed, expected_normed = torch.empty(2, num_tokens, size, dtype=stream.dtype, device=self.device)
            add_rms_norm(expected, reference_sum(parts), weight, 1e-5, expected_normed)
            self.sums.one_shot.add_rms_norm(stream, parts[self.communicator.rank], weight, 1e-5, normed)
            self.compare(f"{num_tokens}x{size}, residual", stream, expected)
            self.compare(f"{num_tokens}x{size}, norm", normed, expected_normed)

    def in_a_graph(self) -> None:
        """Replay calls of two sizes, with other numbers each time."""
        shapes = (2, 4096), (40, 7168), (2, 4096)
        inputs = [torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for shape in shapes]
        outputs = [torch.empty_like(each) for each in inputs]

        def work() -> None:
            for given, out in zip(inputs, outputs, strict=True):
                out.copy_(given)
                self.sums.one_shot.sum(out)

        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        for replay in range(REPLAYS):
            parts = [self.parts(1000 * replay + i, *shape) for i, shape in enumerate(shapes)]
            for given, each in zip(inputs, parts, strict=True):
                given.copy_(each[self.communicator.rank])
            graph.replay()
            for each, out in zip(parts, outputs, strict=True):
                self.compare("in a graph", out, reference_sum(each))
            self.sums.one_shot.sum(inputs[0])  # one by itself, between two replays
            self.compare("between graphs", inputs[0], reference_sum(parts[0]))


def late_now_and_then(rank: int) -> Callable[[], None]:
    """Keep this rank's GPU busy before some calls, for up to a tenth of a millisecond: others than its peers'."""
    own = random.Random(rank)
    return lambda: torch.cuda._sleep(own.randrange(DELAY_CYCLES)) if own.random() < 0.2 else None


def main(number: int, size: int, store: Path) -> None:
    rank = Rank(number, size, store)
    rank.beside_nccl()
    rank.norms()
    rank.in_a_row(lambda: None)
    rank.in_a_row(late_now_and_then(number))
    rank.in_a_graph()
    torch.cuda.synchronize()
    rank.communicator.smallest(0)  # nobody leaves before all are done
    print(json.dumps({"wrong": dict(rank.wrong), "late": int(rank.sums.one_shot.late)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
