"""Steps of two schedulers that share experts on one GPU: two threads, a stream each, kernels that meet in one memory.

It shows on one GPU what two would do: rounds of prompts, of decode steps, beside an idle scheduler, launched kernel by
kernel and replayed. Logits are compared to those of a runner that has all experts and no other scheduler: *distance* is
the largest difference, of the largest logit; *same likeliest* the share of rows. *Launched, replayed* are milliseconds
of a round in which both decode; both share one GPU and one interpreter's lock, so times say what recording saves, and
nothing of two GPUs. On stderr: what a replayed round's kernels take, of both schedulers.

    PYTHONPATH=bench python bench/gpu/common_steps.py [--json]      # about 60 s
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from llama_8b import model_folder
from report import Report, arguments
from shared_experts import SHAPE
from torch import Tensor
from torch._C._autograd import DeviceType

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.models.expert_ranks import PeerExchange
from diptych.engine.runner.gpu.gpu_runner import GpuRunner, Recorded
from diptych.engine.runner.gpu.graphs import Captured, Graphs
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.new_runner import new_runner
from diptych.engine.runner.gpu.piece_graphs import PieceGraphs
from diptych.engine.runner.kv_pool import new_kv
from diptych.engine.runner.loaded_model import LoadedModel, ModelOptions, load_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.lockstep import part_of
from diptych.engine.tensor_parallel.sharing.expert_group import LoneCommunicator
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.engine.values.expert_placement import ExpertPlacement, balanced
from diptych.engine.values.rounds import NOTHING, Round
from diptych.kernels.gpu.collectives.expert_exchange import ExchangeShape, ExpertExchange

BENCH: Final = "gpu/common_steps"
LAYERS: Final = 4
PAGE: Final = 16
PAGES: Final = 8  # of a request
REQUESTS: Final = 64  # of a scheduler
RUNGS: Final = (8, 64)
TOKEN_RUNGS: Final = (128, 256)
LIMITS: Final = StepLimits(max_step_tokens=512, max_requests=REQUESTS, max_pages=PAGES, max_graph_tokens=256)
MAX_POLLS: Final = 20_000_000  # some seconds
MOST_ROWS: Final = 512
ROUNDS: Final = 50
PROFILED: Final = 5
LARGEST: Final = 10  # kernels that are named
DTYPE: Final = torch.bfloat16
PREFILL, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
T = TypeVar("T")


class Turns:
    """Where both threads wait for each other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)

    def one_by_one(self, rank: int, work: Callable[[], T]) -> T:
        """Run both threads' work, rank 0's first; nothing of it may wait for the other's."""
        found: list[T] = []
        for turn in range(2):
            self.barrier.wait()
            if turn == rank:
                found.append(work())
        self.barrier.wait()
        return found[0]


@dataclass
class Exchange:
    """Implements `PeerExchange` by one that can be made anew."""

    inner: ExpertExchange
    most_rows: int = MOST_ROWS

    def dispatch(self, *given: Any) -> Any:
        return self.inner.dispatch(*given)

    def combine(self, *given: Any) -> None:
        self.inner.combine(*given)


@dataclass
class Experts:
    """Implements `ExpertRanks` of a thread whose rows all go through memory."""

    rank: int
    exchange: Exchange
    size: int = 2
    round: Round | None = None
    padded_rows: int | None = None
    most_recorded: int = MOST_ROWS
    sizes: Tensor = field(default_factory=lambda: torch.full((2,), 1 << 30, dtype=torch.int32, device="cuda"))

    def begin(self, common: Round) -> None:
        own = common.parts[self.rank]
        self.round, self.padded_rows = common, None
        self.sizes.view(torch.int64).fill_(own.num_tokens | own.num_picked << 32)

    def placement(self, layer: int, num_experts: int) -> ExpertPlacement:
        return balanced([1.0] * num_experts, self.size)

    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        return self.placement(layer, num_experts).of_ranks[self.rank]

    def room(self, num_experts: int) -> int:
        return num_experts // self.size

    def peers(self, width: int, experts_per_token: int, room: int) -> PeerExchange:
        return self.exchange

    def num_tokens(self, *, is_last: bool) -> Tensor:
        return self.sizes[1:] if is_last else self.sizes[:1]

    def count(self, layer: int, chosen: Tensor) -> None:
        pass


class Capture:
    """Implements `Capture`: on one GPU nobody may replay what waits for the other while that one records."""

    def __init__(self, rank: int, turns: Turns) -> None:
        self._rank, self._turns = rank, turns
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, work: Callable[[], T]) -> Captured[T]:
        work()
        torch.cuda.current_stream().synchronize()
        return self._turns.one_by_one(self._rank, lambda: self._recorded(work))

    def _recorded(self, work: Callable[[], T]) -> Captured[T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = work()
        return Captured(graph.replay, output)

    def used_nbytes(self) -> int:
        return 0


class Again:
    """Implements `Capture`: what would be recorded is run instead."""

    def capture(self, work: Callable[[], T]) -> Captured[T]:
        return Captured(lambda: None, work())

    def used_nbytes(self) -> int:
        return 0


def step(mode: ForwardMode, numbers: Sequence[int], before: int, new: int) -> ForwardBatch:
    """Return a step of some requests that have `before` tokens each: `new` more."""
    positions = np.tile(np.arange(before, before + new), len(numbers))
    owners = np.repeat(numbers, new)
    return ForwardBatch(
        mode=mode,
        input_ids=(7 * positions + 311 * owners) % 30_000 + 2,
        positions=positions,
        out_slots=owners * PAGES * PAGE + positions,
        page_table=np.array([np.arange(PAGES) + number * PAGES for number in numbers], np.int32),
        seq_lens=np.full(len(numbers), before + new),
        extend_lens=np.full(len(numbers), new),
        num_sampled=np.ones(len(numbers), np.int64),
    )


EIGHT, ALL = range(8), range(REQUESTS)
Steps = tuple[ForwardBatch | None, ForwardBatch | None]
STEPS: Final[Sequence[Steps]] = (
    (step(PREFILL, EIGHT, 0, 32), step(PREFILL, range(4), 0, 32)),
    (step(DECODE, EIGHT, 32, 1), step(DECODE, range(3), 32, 1)),
    (step(DECODE, EIGHT, 33, 1), None),
    (None, step(DECODE, range(3), 33, 1)),
    (step(DECODE, EIGHT, 34, 1), step(PREFILL, range(4, 8), 0, 16)),
    (step(PREFILL, ALL, 0, 4), step(PREFILL, ALL, 0, 8)),  # the second is larger than what is recorded
    (step(DECODE, ALL, 8, 1), step(DECODE, ALL, 8, 1)),
)


class Scheduler:
    """One of two, in a thread."""

    def __init__(self, rank: int, source: ModelSource, exchange: Exchange, turns: Turns) -> None:
        self.rank, self.turns = rank, turns
        self.experts = Experts(rank, exchange)
        communicator: Any = LoneCommunicator(self.experts)  # type: ignore[arg-type]
        self.model = new_model(source, communicator)
        self.stream = torch.cuda.Stream()
        self.launched = new_runner(self.model, LIMITS, torch.device("cuda"), with_graphs=False)
        self.replayed = self._recording(Capture(rank, turns))

    def _recording(self, capture: Any) -> GpuRunner:
        runner, buffers = (
            new_runner(self.model, LIMITS, torch.device("cuda"), with_graphs=False),
            self.model.new_buffers,
        )
        pieces = PieceGraphs(TOKEN_RUNGS, capture, lambda num_tokens: buffers(num_tokens, torch.device("cuda")))
        runner.recorded = Recorded(Graphs(RUNGS, capture), pieces)
        return runner

    def warm_up(self) -> None:
        """Load all kernels, alone: nobody waits long for the other, and what is computed means nothing."""
        for steps in STEPS:
            common = round_of(steps)
            self.experts.begin(common)
            run(self.launched, steps[self.rank])
        self.experts.round = None
        with torch.inference_mode():
            self.record(self._recording(Again()))
        torch.cuda.synchronize()

    def record(self, runner: GpuRunner) -> None:
        for rung in RUNGS:
            runner.logits(step(DECODE, range(rung), 0, 1))
        for rung in TOKEN_RUNGS:
            runner.logits(step(PREFILL, range(rung // 32), 0, 32))

    def compute(self, runner: GpuRunner) -> list[Tensor | None]:
        found = []
        for steps in STEPS:
            self.turns.barrier.wait()
            self.experts.begin(round_of(steps))
            found.append(run(runner, steps[self.rank]))
        torch.cuda.current_stream().synchronize()
        return found


RunnerOf = Callable[[Scheduler], GpuRunner]
LAUNCHED: Final[RunnerOf] = attrgetter("launched")
REPLAYED: Final[RunnerOf] = attrgetter("replayed")


def timed(steps: Steps, rounds: int, runner_of: RunnerOf, scheduler: Scheduler) -> float:
    """Return milliseconds a round."""
    runner = runner_of(scheduler)
    scheduler.turns.barrier.wait()
    began_s = time.perf_counter()
    for _ in range(rounds):
        scheduler.turns.barrier.wait()
        scheduler.experts.begin(round_of(steps))
        run(runner, steps[scheduler.rank])
    torch.cuda.current_stream().synchronize()
    scheduler.turns.barrier.wait()
    return (time.perf_counter() - began_s) / rounds * 1e3


def run(runner: GpuRunner, batch: ForwardBatch | None) -> Tensor | None:
    if batch is None:
        runner.serve_others()
        return None
    return runner.logits(batch).float()


def round_of(steps: Steps) -> Round:
    return Round(tuple(NOTHING if each is None else part_of(each) for each in steps))


def new_model(source: ModelSource, communicator: Any) -> LoadedModel:
    layout = ModelRunner.pool_layout(
        source.config, num_pages=REQUESTS * PAGES, page_size=PAGE, dtype=str(DTYPE).removeprefix("torch.")
    )
    kv = new_kv(layout, torch.device("cuda"))
    return load_model(source, kv, ModelOptions("bfloat16", max_requests=REQUESTS), communicator)


def expected(source: ModelSource) -> list[list[Tensor | None]]:
    """Return what each scheduler's steps give where there are all experts, launched."""
    runner = new_runner(new_model(source, None), LIMITS, torch.device("cuda"), with_graphs=False)
    return [[None if (own := steps[rank]) is None else run(runner, own) for steps in STEPS] for rank in range(2)]


def distance(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> tuple[float, float]:
    """Return the largest difference, of the largest logit, and the share of rows with the same likeliest token."""
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    far = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in pairs])
    return far, float(same.float().mean())


def measure(report: Report, folder: Path) -> None:
    source = open_model(str(folder), "dummy")
    alone = expected(source)
    moe = source.config.moe
    assert moe is not None
    shape = ExchangeShape(2, moe.num_experts // 2, moe.experts_per_token, source.config.hidden_size, 2, MOST_ROWS)
    memory = [torch.zeros(shape.memory_nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    addresses = [each.data_ptr() for each in memory]

    def new_exchange(rank: int, max_polls: int) -> ExpertExchange:
        return ExpertExchange(rank, shape, memory[rank], addresses, max_polls=max_polls, traps=False)

    turns, exchanges = Turns(), [Exchange(new_exchange(rank, 1)) for rank in range(2)]
    schedulers = [Scheduler(rank, source, exchanges[rank], turns) for rank in range(2)]
    for scheduler in schedulers:
        scheduler.warm_up()
    for rank, exchange in enumerate(exchanges):
        memory[rank].zero_()
        exchange.inner = new_exchange(rank, MAX_POLLS)
    torch.cuda.synchronize()

    def both(work: Callable[[Scheduler], T]) -> list[T]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda scheduler: in_stream(scheduler, work), schedulers))

    launched = both(lambda each: each.compute(each.launched))
    torch.cuda.synchronize()
    for scheduler in schedulers:
        scheduler.experts.round = None
        scheduler.experts.sizes.fill_(1 << 30)
    torch.cuda.synchronize()
    both(lambda each: each.record(each.replayed))
    replayed = both(lambda each: each.compute(each.replayed))
    late = [int(exchange.inner.late) for exchange in exchanges]
    report.row(BENCH, "programs that waited in vain", sum(late), "of all")
    for name, results in (("launched", launched), ("replayed", replayed)):
        for rank, found in enumerate(results):
            far, same = distance(found, alone[rank])
            report.row(BENCH, f"{name}, scheduler {rank}: distance", far, "of 1", peers={"same likeliest": same})
    for steps, words in ((STEPS[1], "8 and 3 rows"), (STEPS[-1], "64 and 64 rows")):
        slow, fast = (both(partial(timed, steps, ROUNDS, each))[0] for each in (LAUNCHED, REPLAYED))
        report.row(BENCH, f"a round, {words}, {LAYERS} layers: replayed", fast, "ms", slow, "launched", slow / fast)
        kernels = profiled(partial(both, partial(timed, steps, PROFILED, REPLAYED)))
        print(f"{words}: {kernels}", file=sys.stderr)


def in_stream(scheduler: Scheduler, work: Callable[[Scheduler], T]) -> T:
    with torch.cuda.stream(scheduler.stream), torch.inference_mode():
        return work(scheduler)


def profiled(work: Callable[[], object]) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events = [each for each in profile.key_averages() if each.device_type == DeviceType.CUDA]
    largest = sorted(events, key=lambda each: -each.self_device_time_total)[:LARGEST]
    named = "; ".join(
        f"{each.key[:40]} x{each.count / PROFILED:g} {each.self_device_time_total / PROFILED:.0f}" for each in largest
    )
    total = sum(each.self_device_time_total for each in events) / PROFILED
    return f"{sum(each.count for each in events) / PROFILED:g} kernels, {total:.0f} us: {named}"


def main() -> None:
    options = arguments(__doc__).parse_args()
    with Report(as_json=options.json) as report, model_folder(dict(SHAPE) | {"num_hidden_layers": LAYERS}) as folder:
        measure(report, folder)


if __name__ == "__main__":
    main()
