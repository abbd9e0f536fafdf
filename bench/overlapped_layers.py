"""Layers of schedulers that share experts, in whole and in halves that take turns: what overlap gains, what it costs.

Two processes have half of the experts each, and compute eight layers as `Decoder.forward_both` does: in place of
attention products of each row, then rows to their experts and back by the product's own `SpreadExperts` (gloo on a
CPU, NCCL on GPUs), with a product of each row in place of an expert. *whole*: all rows at once. *halves*: two
micro-batches, one of which computes while rows of the other travel. *nothing sent*: whole, with the experts' products
of own rows: what no overlap can beat. On stderr: the same in halves, so what halving costs by itself.

Two processes of one machine have no link to speak of. So on a CPU the same is measured once more with an *artificial*
one: what was sent is there `--delay-ms` after it was, at the earliest. That is no network: it says whether waiting is
hidden, and no more.

    PYTHONPATH=bench python bench/overlapped_layers.py [--delay-ms 3] [--json]

A time is the least that a step takes on the slower rank; the ways take turns, for other load comes and goes. *Of it
waited for*: how long a step sleeps because what was sent over the artificial link is not there yet. Takes about 40 s.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from rank_processes import output_of_ranks
from report import Report, arguments
from torch import Tensor

from diptych.engine.models.expert_ranks import Coming
from diptych.engine.models.layers.spread_experts import Places, SpreadExperts
from diptych.engine.models.operations import YIELD, Operation, in_order, in_turn
from diptych.engine.models.ranks import ALONE
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.tensor_parallel.sharing.expert_group import ExpertGroup
from diptych.engine.values.rounds import Part, Round

BENCH: Final = "overlapped_layers"
NUM_RANKS: Final = 2
NUM_EXPERTS: Final = 64
CHOICES: Final = 8
LAYERS: Final = 8
WARM: Final = 2  # calls
WAITS: Final = 5  # calls whose waiting is looked at
TIMEOUT_S: Final = 300


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    device: str
    dtype: str
    width: int
    num_rows: int  # of each rank
    attention_products: int  # in place of attention
    num_calls: int


ON_CPU: Final = (
    Case("cpu", "float32", 512, 64, 4, 11),
    Case("cpu", "float32", 512, 512, 4, 9),
)
ON_GPUS: Final = (
    Case("cuda", "bfloat16", 7168, 64, 2, 30),
    Case("cuda", "bfloat16", 7168, 1024, 2, 30),
    Case("cuda", "bfloat16", 7168, 4096, 2, 15),
)


class DelayedGroup(ExpertGroup):
    """What is sent is not there before a time: an artificial link, on which bytes cost nothing."""

    delay_s = 0.0
    waited_s = 0.0  # so far, for the artificial link alone

    def all_gather(self, part: Tensor) -> Coming:
        return self._later(super().all_gather(part))

    def exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Coming:
        return self._later(super().exchange(rows, num_sent, num_received))

    def _later(self, coming: Coming) -> Coming:
        if not self.delay_s:
            return coming
        due_s = time.perf_counter() + self.delay_s

        def wait() -> Tensor:
            out = coming()
            left_s = max(0.0, due_s - time.perf_counter())
            time.sleep(left_s)
            self.waited_s += left_s
            return out

        return wait


@dataclass(frozen=True, slots=True)
class OneProduct:
    """Implements `Experts`: every row is multiplied once, whatever experts it chose."""

    matrix: Tensor

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        torch.mm(x, self.matrix, out=out)


class Layers:
    """Eight layers of one rank."""

    def __init__(self, case: Case, group: DelayedGroup, device: torch.device) -> None:
        made = torch.Generator().manual_seed(0)
        shape, dtype = (case.width, case.width), getattr(torch, case.dtype)
        self._matrix = torch.randn(shape, generator=made).div_(case.width**0.5).to(device, dtype)
        self._num_products = case.attention_products
        self._group = group
        self._experts = OneProduct(self._matrix)
        places = Places.of(group.placement(0, NUM_EXPERTS), group.rank, device)
        self._spread = SpreadExperts(self._experts, places, group, ALONE, 0, is_last=False)
        rows = torch.Generator().manual_seed(1 + group.rank)
        self._x = torch.randn(case.num_rows, case.width, generator=rows).to(device, dtype)
        self._chosen = torch.rand(case.num_rows, NUM_EXPERTS, generator=rows).topk(CHOICES).indices.to(device)
        self._shares = torch.rand(case.num_rows, CHOICES, generator=rows).to(device, dtype)

    def whole(self) -> None:
        self._group.begin(self._round(len(self._x)))
        in_order(self._sent(slice(None)))

    def halves(self) -> None:
        half = len(self._x) // 2
        self._group.begin(self._round(half))
        for _, operation in in_turn([self._sent(slice(0, half)), self._sent(slice(half, None))]):
            operation()

    def nothing_sent(self) -> None:
        in_order(self._kept(slice(None)))

    def nothing_sent_in_halves(self) -> None:
        half = len(self._x) // 2
        for _, operation in in_turn([self._kept(slice(0, half)), self._kept(slice(half, None))]):
            operation()

    def waited(self, work: Callable[[], None]) -> float:
        """Return how long a call waits for the artificial link, microseconds."""
        self._group.waited_s = 0.0
        for _ in range(WAITS):
            work()
        return self._group.waited_s / WAITS * 1e6

    @staticmethod
    def _round(num_rows: int) -> Round:
        return Round((Part(num_rows, 0),) * NUM_RANKS)

    def _attend(self, x: Tensor) -> None:
        for _ in range(self._num_products):
            x.copy_(torch.mm(x, self._matrix))

    def _sent(self, rows: slice) -> Iterator[Operation]:
        x, chosen, shares = self._x[rows].clone(), self._chosen[rows], self._shares[rows]
        out = torch.empty_like(x)
        for _ in range(LAYERS):
            yield partial(self._attend, x)
            journey = self._spread.begin(x, chosen, shares, out)
            yield YIELD
            yield journey.arrive
            yield journey.compute
            yield journey.send_back
            yield YIELD
            yield journey.end

    def _kept(self, rows: slice) -> Iterator[Operation]:
        x = self._x[rows].clone()
        out = torch.empty_like(x)
        for _ in range(LAYERS):
            yield partial(self._attend, x)
            yield YIELD
            yield partial(self._experts.forward, x, x, x, out)
            yield YIELD


def timed(works: Sequence[Callable[[], None]], num_calls: int, wait: Callable[[], None]) -> list[float]:
    """Return the least that each takes, microseconds. They are called in turn, for other load comes and goes."""
    least = [math.inf] * len(works)
    for turn in range(WARM + num_calls):
        for place, work in enumerate(works):
            wait()
            began_s = time.perf_counter()
            work()
            wait()
            if turn >= WARM:
                least[place] = min(least[place], time.perf_counter() - began_s)
    return [each * 1e6 for each in least]


def be_rank(rank: int, folder: str, on_gpus: bool, delay_ms: float) -> None:
    """Measure as one of two; rank 0 prints."""
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    wait: Callable[[], None] = lambda: None  # noqa: E731
    if on_gpus:
        torch.cuda.set_device(device)
        wait = torch.cuda.synchronize
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if on_gpus else torch.float32
    kept: Any = {"counts": False, "opens_memory": False, "overlaps": True}
    group = DelayedGroup(SharedExperts(folder, rank, NUM_RANKS), 0, 1, device, dtype, 0, **kept)
    for case in ON_GPUS if on_gpus else ON_CPU:
        layers = Layers(case, group, device)
        for delay in (0.0,) if on_gpus else (0.0, delay_ms):
            group.delay_s = delay / 1e3
            works = layers.whole, layers.halves, layers.nothing_sent, layers.nothing_sent_in_halves
            took = torch.tensor([timed(works, case.num_calls, wait)], device=device)
            waited = torch.tensor([[layers.waited(work) for work in works[:2]]], device=device)
            slower = group.all_gather(torch.cat([took, waited], 1).float())().amax(0)
            if rank == 0:
                print(json.dumps([case.num_rows, case.width, delay, slower.tolist()]), flush=True)


def measure(report: Report, name: str, *, on_gpus: bool, delay_ms: float) -> None:
    """Measure all cases; `name`: of the benchmark that asks."""
    with tempfile.TemporaryDirectory(prefix="diptych-") as folder:
        asked = ["--folder", folder, "--delay-ms", str(delay_ms), *(["--gpus"] if on_gpus else [])]
        output = output_of_ranks([__file__, *asked], NUM_RANKS, TIMEOUT_S)
    for num_rows, width, delay, times in map(json.loads, output.splitlines()):
        whole, halves, limit, limit_in_halves, whole_waits, halves_wait = times
        link = f", artificial link {delay:g} ms" if delay else ""
        case = f"{LAYERS} layers of {num_rows} rows, {width} wide{link}"
        report.row(name, f"{case}, halves", halves, "us", whole, "whole", whole / halves, {"nothing sent": limit})
        print(f"{case}: nothing sent {limit:.0f} us whole, {limit_in_halves:.0f} us in halves", file=sys.stderr)
        if delay:
            report.row(name, f"{case}, of it waited for", halves_wait, "us", whole_waits, "whole")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--delay-ms", type=float, default=3.0, help="of the artificial link")
    parser.add_argument("--gpus", action="store_true", help="be measured on two GPUs")
    parser.add_argument("--rank", type=int, help="be this rank of two that meet in --folder")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.rank is not None:
        with torch.inference_mode():
            be_rank(options.rank, options.folder, options.gpus, options.delay_ms)
        return
    with Report(as_json=options.json) as report:
        measure(report, BENCH, on_gpus=options.gpus, delay_ms=options.delay_ms)


if __name__ == "__main__":
    main()
