"""Sums over two GPUs, two processes, by our kernel and by NCCL: what an all-reduce costs a layer.

A sum of each size is replayed from a graph, ours and NCCL's in turns in the same run; a time is the median of what a
call takes on the slower rank. *and norm*: with the residual stream's addition and norm, which is one kernel of ours
against NCCL's and our norm kernel. *scattered*: a reduce-scatter, the norm of a part of the rows and an all-gather,
against an all-reduce and the norm of all. *dispatch* and *combine*: each rank's tokens to the ranks of their experts
and back (7,168 numbers a token, 8 of 256 experts), against NCCL's all-to-all of as many bytes, without the copies that
it would want before and behind. What is measured is compared to a reference first. `--forms`: dispatch and combine
alone, divided among programs in several ways.
Needs two GPUs: `bench/gpu/run.sh collectives`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from rank_processes import output_of_ranks
from report import Report, arguments
from torch import Tensor

from diptych.engine.tensor_parallel.communicator import TorchCommunicator
from diptych.engine.tensor_parallel.meeting import FileMeeting
from diptych.engine.tensor_parallel.peer_sums import open_memory, open_peer_sums
from diptych.kernels.expert_places import ExpertTable, Received
from diptych.kernels.gpu.collectives.expert_exchange import (
    COMBINE,
    DISPATCH,
    ExchangeShape,
    ExpertExchange,
    Form,
)
from diptych.kernels.gpu.collectives.one_shot import OneShotSum, reference_sum
from diptych.kernels.gpu.layers.norms import add_rms_norm

NUM_RANKS: Final = 2
HIDDEN: Final = 4096
KIB: Final = 1 << 10
SIZES_KIB: Final = (16, 64, 256, 1024)
PROMPTS: Final = (512, 2048, 8192)  # tokens of scattered sums
EXCHANGES: Final = (64, 4096)  # tokens of each rank
TOKEN: Final = 7168
EXPERTS: Final = 256
CHOICES: Final = 8
CALLS: Final = 32  # in a graph
WARM: Final = 10  # replays; a number, not a time: ranks must make the same calls
REPLAYS: Final = 25
FORMS: Final = (  # of `combine`; `dispatch` has as many programs and warps
    COMBINE,
    Form(128, 8),
    Form(128, 16, 2, 4),
    Form(128, 16, 1, 4),
    Form(128, 16, 2, 2),
    Form(128, 16, 1, 2),
    Form(256, 8, 1, 2),
    Form(256, 16, 1, 4),
    Form(256, 4, 1, 4),
)
MAX_POLLS: Final = 20_000_000  # some seconds
TIMEOUT_S: Final = 80
DTYPE: Final = torch.bfloat16

Work = Callable[[], object]


class Rank:
    """What one process measures."""

    def __init__(self, rank: int, store: Path) -> None:
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.communicator = TorchCommunicator(rank, NUM_RANKS, FileMeeting(store), self.device)
        opened = open_peer_sums(self.communicator, self.device, max_polls=MAX_POLLS)
        if opened is None:
            raise SystemExit("the GPUs can't open each other's memory")
        self.ours: OneShotSum = opened.one_shot
        self.weight = torch.ones(HIDDEN, dtype=DTYPE, device=self.device)

    def microseconds(self, *works: Work) -> list[float]:
        """Return what a call of each takes, on the slower rank; they are replayed in turns."""
        graphs = [self._captured(work) for work in works]
        times: list[list[float]] = [[] for _ in works]
        for turn in range(WARM + REPLAYS):
            for graph, found in zip(graphs, times, strict=True):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graph.replay()  # after which both ranks are at one point
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if turn >= WARM:
                    found.append(begin.elapsed_time(end) * 1e3 / CALLS)
        slower = torch.tensor([statistics.median(found) for found in times], device=self.device)
        dist.all_reduce(slower, dist.ReduceOp.MAX)
        return slower.tolist()

    def _captured(self, work: Work) -> torch.cuda.CUDAGraph:
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                work()
        return graph

    def new(self, num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, HIDDEN, dtype=DTYPE, device=self.device)

    def check(self, num_tokens: int) -> None:
        """Stop where a sum is wrong."""
        generator = torch.Generator().manual_seed(num_tokens)
        made = [torch.randn(num_tokens, HIDDEN, generator=generator) for _ in range(NUM_RANKS)]
        parts = [part.to(self.device, DTYPE) for part in made]
        expected = reference_sum(parts)
        found, stream, normed = parts[self.communicator.rank].clone(), parts[0].clone(), self.new(num_tokens)
        self.ours.sum(found)
        self.ours.add_rms_norm(stream, parts[self.communicator.rank], self.weight, 1e-5, normed)
        after, after_normed = parts[0].clone(), self.new(num_tokens)
        add_rms_norm(after, expected, self.weight, 1e-5, after_normed)
        if not (torch.equal(found, expected) and torch.equal(stream, after) and torch.equal(normed, after_normed)):
            raise SystemExit(f"a sum of {num_tokens} rows is wrong")

    def sum(self, num_tokens: int) -> Mapping[str, float]:
        x = self.new(num_tokens)
        ours, theirs = self.microseconds(lambda: self.ours.sum(x), lambda: dist.all_reduce(x))
        return {"value": ours, "limit": theirs}

    def sum_and_norm(self, num_tokens: int) -> Mapping[str, float]:
        stream, delta, out = (self.new(num_tokens) for _ in range(3))

        def norm() -> None:
            add_rms_norm(stream, delta, self.weight, 1e-5, out)

        def nccl() -> None:
            dist.all_reduce(delta)
            norm()

        def in_turn() -> None:
            self.ours.sum(delta)
            norm()

        fused, theirs, two, alone = self.microseconds(
            lambda: self.ours.add_rms_norm(stream, delta, self.weight, 1e-5, out), nccl, in_turn, norm
        )
        return {"value": fused, "limit": theirs, "our two kernels": two, "the norm alone": alone}

    def scattered(self, num_tokens: int) -> Mapping[str, float]:
        stream, delta, out = (self.new(num_tokens) for _ in range(3))
        part = num_tokens // NUM_RANKS
        own, own_out = self.new(part), self.new(part)

        def scattered() -> None:
            dist.reduce_scatter_tensor(own, delta)
            add_rms_norm(stream[:part], own, self.weight, 1e-5, own_out)
            dist.all_gather_into_tensor(out, own_out)

        def whole() -> None:
            dist.all_reduce(delta)
            add_rms_norm(stream, delta, self.weight, 1e-5, out)

        ours, theirs = self.microseconds(scattered, whole)
        return {"value": ours, "limit": theirs}


class Exchange:
    """Tokens of one number on their way to experts and back."""

    def __init__(self, rank: Rank, num_tokens: int) -> None:
        self._rank = rank
        self._num_tokens = num_tokens
        device, own = rank.device, rank.communicator.rank
        self._shape = ExchangeShape(NUM_RANKS, EXPERTS // NUM_RANKS, CHOICES, TOKEN, DTYPE.itemsize, num_tokens)
        opened = open_memory(rank.communicator, device, self._shape.memory_nbytes)
        if opened is None:
            raise SystemExit("the GPUs can't open each other's memory")
        self._memory, self._addresses = opened
        in_order = torch.arange(EXPERTS, dtype=torch.int32, device=device)[:, None]
        self._table = ExpertTable(in_order, torch.ones_like(in_order[:, 0]))
        self._count = torch.tensor([num_tokens], dtype=torch.int32, device=device)
        self.divide(DISPATCH, COMBINE)
        generator = torch.Generator().manual_seed(own)
        self._x = torch.randn(num_tokens, TOKEN, generator=generator).to(device, DTYPE)
        scores = torch.rand(num_tokens, EXPERTS, generator=generator)
        self._chosen = scores.topk(CHOICES).indices.to(device, torch.int32)
        self._shares = torch.rand(num_tokens, CHOICES, generator=generator).to(device)

    def divide(self, dispatch: Form, combine: Form) -> None:
        """Have calls divided so from now on: on both ranks at once, after all that were made."""
        torch.cuda.synchronize()
        self._rank.communicator.smallest(0)
        self._memory.tensor().zero_()  # flags count from 0 again
        torch.cuda.synchronize()
        self._rank.communicator.smallest(0)
        self._ours = ExpertExchange(
            self._rank.communicator.rank,
            self._shape,
            self._memory.tensor(),
            self._addresses,
            dispatch=dispatch,
            combine=combine,
            max_polls=MAX_POLLS,
        )

    def dispatch(self) -> Received:
        """Call it."""
        return self._ours.dispatch(self._x, self._chosen, self._shares, self._table, self._count, self._num_tokens)

    def check(self) -> None:
        """Stop where a token does not come back with the sum of its experts: number e multiplies by e + 1."""
        out = torch.empty_like(self._x)
        received = self.dispatch()
        first, num_own = self._rank.communicator.rank * EXPERTS // NUM_RANKS, EXPERTS // NUM_RANKS
        is_ours = received.chosen < num_own
        factors = ((first + received.chosen + 1) * received.shares).where(is_ours, 0).sum(1, keepdim=True)
        results = torch.where(is_ours.any(1, keepdim=True), received.x * factors, torch.nan).to(DTYPE)
        self._ours.combine(results, received, out)
        expected = self._x * ((self._chosen + 1) * self._shares).sum(1, keepdim=True)
        distance = (out - expected).abs().max() / expected.abs().max()
        if not distance < 2**-6:  # bfloat16: results are rounded, and their sum
            raise SystemExit(f"what came back of {self._num_tokens} tokens is wrong by {float(distance):.3g}")

    def times(self) -> Sequence[tuple[str, Mapping[str, float]]]:
        count = self._num_tokens
        got, sent = torch.zeros(2, NUM_RANKS * count, TOKEN, dtype=DTYPE, device=self._rank.device)
        dispatch, combine, nccl = self._rank.microseconds(*self.both(), lambda: dist.all_to_all_single(got, sent))
        to_peer = self.to_peer_nbytes
        named = (("dispatch", dispatch), ("combine", combine))
        return [(f"{name}/{count} tokens", {"value": ours, "limit": nccl}) for name, ours in named] + [
            (f"{name}, to the peer/{count} tokens", {"gbs": to_peer / ours / 1e3, "limit": to_peer / nccl / 1e3})
            for name, ours in named
        ]

    def both(self) -> tuple[Work, Work]:
        """Return what dispatches, and what combines."""
        received = self.dispatch()
        out, results = torch.empty_like(self._x), torch.zeros_like(received.x)
        return self.dispatch, lambda: self._ours.combine(results, received, out)

    @property
    def to_peer_nbytes(self) -> int:
        """About the same both ways."""
        return int((self._chosen >= EXPERTS // NUM_RANKS).any(1).sum()) * TOKEN * DTYPE.itemsize


def measured_forms(rank: Rank) -> None:
    """Print, as rank 0, what the exchange takes in each of `FORMS`."""
    for num_tokens in EXCHANGES:
        exchange = Exchange(rank, num_tokens)
        for form in FORMS:
            exchange.divide(Form(form.programs, form.num_warps), form)
            exchange.check()
            times = rank.microseconds(*exchange.both())
            if rank.communicator.rank:
                continue
            words = f"{form.programs} x {form.num_warps} warps, {form.rows} rows, {min(form.segment, 99)} a segment"
            for name, ours in zip(("dispatch", "combine"), times, strict=True):
                speed = exchange.to_peer_nbytes / ours / 1e3
                print(json.dumps([f"{name}/{num_tokens} tokens, {words}", {"us": ours, "gbs": speed}]), flush=True)


def measured(rank: Rank, sizes: Sequence[int], prompts: Sequence[int]) -> None:
    """Print each case as rank 0."""

    def say(case: str, found: Mapping[str, float]) -> None:
        if rank.communicator.rank == 0:
            print(json.dumps([case, found]), flush=True)

    for kib in sizes:
        num_tokens = kib * KIB // (HIDDEN * DTYPE.itemsize)
        rank.check(num_tokens)
        say(f"sum/{kib} KiB", rank.sum(num_tokens))
        say(f"sum and norm/{kib} KiB", rank.sum_and_norm(num_tokens))
    for num_tokens in EXCHANGES:
        exchange = Exchange(rank, num_tokens)
        exchange.check()
        for case, found in exchange.times():
            say(case, found)
    for num_tokens in prompts:
        say(f"scattered sum and norm/{num_tokens} tokens", rank.scattered(num_tokens))


def measure(*options: str) -> list[tuple[str, dict[str, float]]]:
    """Run both ranks; return the cases. None of them outlives this call."""
    with tempfile.TemporaryDirectory() as folder:
        output = output_of_ranks([__file__, *options, "--store", f"{folder}/store"], NUM_RANKS, TIMEOUT_S)
    return [tuple(json.loads(line)) for line in output.splitlines() if line.startswith("[")]


def report_case(report: Report, case: str, found: dict[str, Any]) -> None:
    if "us" in found:
        report.row("gpu/collectives", case, found["us"], "us", peers={"GB/s to the peer": found["gbs"]})
        return
    limit = found.pop("limit")
    if "gbs" in found:
        report.row("gpu/collectives", case, found["gbs"], "GB/s", limit, "NCCL", found["gbs"] / limit)
        return
    value = found.pop("value")
    report.row("gpu/collectives", case, value, "us", limit, "NCCL", limit / value, found)


def be_rank(rank: Rank, *, quick: bool, forms: bool) -> None:
    if forms:
        measured_forms(rank)
    else:
        measured(rank, SIZES_KIB[::3] if quick else SIZES_KIB, PROMPTS[:1] if quick else PROMPTS)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rank", type=int, help="be this rank of two that meet at --store")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--forms", action="store_true", help="only: ways to divide the exchange")
    options = parser.parse_args()
    if options.rank is not None:
        with torch.inference_mode():
            be_rank(Rank(options.rank, options.store), quick=options.quick, forms=options.forms)
        return
    with Report(as_json=options.json) as report:
        for case, found in measure(*(f"--{name}" for name in ("quick", "forms") if getattr(options, name))):
            report_case(report, case, found)


if __name__ == "__main__":
    main()
