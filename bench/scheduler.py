"""Host time of a scheduler: everything that a decode step costs but computing it, and the prefix cache.

The whole loop of a scheduler process runs, with command channel and protobuf messages, over a model that computes
nothing and answers at once. What passes between two of its steps is the scheduler's own time. The limit of a step is
the target, 500 us; of the prefix cache, one pass over the same tokens by numpy or xxhash.

    python bench/scheduler.py
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import xxhash
import zmq
from report import Report, arguments

from diptych.common.errors import ConfigError
from diptych.common.members.roles import Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.lora.host import NoAdapters
from diptych.engine.lora.registry import LoraRegistry
from diptych.engine.schedule.adapter_turns import AdapterTurns
from diptych.engine.scheduler.adapters import Adapters
from diptych.engine.scheduler.admin_thread import AdminThread
from diptych.engine.scheduler.grammar_thread import GrammarThread
from diptych.engine.scheduler.links.links import links_of_nobody
from diptych.engine.scheduler.loop import Parts, SchedulerLoop
from diptych.engine.scheduler.news import News
from diptych.engine.scheduler.stepping import (
    OverlappedStepping,
    Stepping,
    StepWatch,
    SynchronousStepping,
    TpModelWorkerClient,
)
from diptych.engine.values.batch import (
    ForwardBatch,
    ForwardMode,
    OverlapRunner,
    Runner,
    SamplingBatch,
    StepResult,
    WaitForResult,
)
from diptych.engine.values.events import Start
from diptych.engine.values.limits import PROMPT_ROWS, Limits, Scheduling
from diptych.engine.values.request import new_request
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.sampling_params import SamplingParams
from diptych.unified.core import UnifiedCore
from diptych.v1 import engine_pb2, inference_pb2, worker_pb2

TARGET_US = 500.0
PAGE_SIZE = 16
PROMPT_LEN = 100
VOCAB_SIZE = 32_000
CONTEXT_LEN = 4096
NUM_CACHED_PAGES = 1000
NUM_EQUAL = 16
EQUAL_LEN = 4096
MODEL_S = 2e-3
GREEDY = inference_pb2.SamplingParams(temperature=0, top_p=1, ignore_eos=True)
DRAWN = inference_pb2.SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=1)


@dataclass(frozen=True)
class Load:
    """Requests of `output_len` tokens; with outputs shorter than the run, others take the place of those that end."""

    batch_size: int
    num_steps: int
    output_len: int
    sampling: inference_pb2.SamplingParams

    @property
    def num_requests(self) -> int:
        return self.batch_size * (2 + self.num_steps // self.output_len)


class InstantRunner:
    """Answers at once; notes how long its caller was busy before each decode step. Calls `stop` after enough steps."""

    def __init__(self, num_steps: int, stop: Callable[[], None]) -> None:
        self.host_s: list[float] = []
        self._num_left = num_steps
        self._stop = stop
        self._rng = np.random.default_rng(0)
        self._left_s = time.perf_counter()

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        if batch.mode is ForwardMode.DECODE:
            self.host_s.append(time.perf_counter() - self._left_s)
        self._num_left -= 1
        if self._num_left == 0:
            self._stop()
        result = StepResult(self._rng.integers(0, VOCAB_SIZE, batch.num_samples))
        self._left_s = time.perf_counter()
        return result


class PacedRunner:
    """Needs `MODEL_S` for a step, in which the host's cores are free, as beside a GPU; notes when each step ended."""

    def __init__(self, num_steps: int, stop: Callable[[], None]) -> None:
        self.ends_s: list[float] = []
        self._num_steps = num_steps
        self._stop = stop

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> float:
        time.sleep(MODEL_S)
        return MODEL_S

    def sample(self, batch: ForwardBatch, logits: float, sampling: SamplingBatch) -> WaitForResult:
        if batch.mode is ForwardMode.DECODE:
            self.ends_s.append(time.perf_counter())
            if len(self.ends_s) == self._num_steps:
                self._stop()
        result = StepResult(np.full(batch.num_samples, 7))
        return lambda: result


R = TypeVar("R")


def serve(
    new_runner: Callable[[int, Callable[[], None]], R],
    new_stepping: Callable[[UnifiedCore, R], Stepping],
    load: Load,
) -> R:
    """Run a scheduler's loop for `load.num_steps` decode steps; return its runner."""
    num_pages = load.batch_size * (PROMPT_LEN + load.output_len + 1) // PAGE_SIZE * 2 + 2
    cache = KvCache(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_requests=load.batch_size + PROMPT_ROWS,
        max_tokens_per_request=CONTEXT_LEN,
    )
    scheduling = Scheduling(max_waiting=10**6)
    core = local_core(cache, Limits(CONTEXT_LEN, VOCAB_SIZE, frozenset({2}), 8192, load.batch_size, scheduling))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frontend, channel = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (frontend, channel):
        socket.set_hwm(0)
    frontend.bind("inproc://scheduler")
    channel.connect("inproc://scheduler")
    for commands in start_commands(load.num_requests, load.sampling, load.output_len):
        frontend.send(commands.SerializeToString())
    shutdown = engine_pb2.SchedulerCommands(shutdown=True).SerializeToString()
    runner = new_runner(load.num_steps, lambda: frontend.send(shutdown))
    stepping = new_stepping(core, runner)
    run_loop(core, stepping, channel, cache)
    stepping.close()
    for socket in (frontend, channel):
        socket.close(linger=0)
    context.term()
    return runner


def local_core(cache: KvCache, limits: Limits) -> UnifiedCore:
    return UnifiedCore(cache, limits, TransferRules(), 0, Role.LOCAL)


def one_by_one(core: UnifiedCore, runner: Runner) -> Stepping:
    return SynchronousStepping(core, runner, time.monotonic)


def overlapped(core: UnifiedCore, runner: OverlapRunner) -> Stepping:
    return OverlappedStepping(core, TpModelWorkerClient(runner), time.monotonic)


def start_commands(
    num_requests: int, sampling: inference_pb2.SamplingParams, output_len: int
) -> list[engine_pb2.SchedulerCommands]:
    rng = np.random.default_rng(1)
    commands = []
    for room in range(1, num_requests + 1):
        leg = worker_pb2.StartLeg(room=room, sampling=sampling, timeout_ms=600_000)
        leg.sampling.max_tokens = output_len + room % 16  # they do not all end, or need a page, in the same step
        leg.prompt_token_ids.extend(rng.integers(0, VOCAB_SIZE, PROMPT_LEN).tolist())
        commands.append(engine_pb2.SchedulerCommands(start=[leg]))
    return commands


def run_loop(core: UnifiedCore, stepping: Stepping, channel: zmq.Socket[bytes], cache: KvCache) -> None:
    """Run a scheduler's loop until the other end of `channel` says shutdown."""
    grammars = GrammarThread(no_compiler)
    adapters: Adapters[Any] = Adapters(LoraRegistry(1, ""), AdapterTurns(0), NoAdapters())
    admin = AdminThread(adapters.handlers)
    links = links_of_nobody()
    parts = Parts(links, grammars, admin, adapters, StepWatch())
    SchedulerLoop(core, stepping, channel, parts, News(core, cache, links, adapters, stepping.meter)).run()
    for part in (grammars, admin, links):
        part.close()


def no_compiler() -> Any:
    raise ConfigError("nobody asks for a grammar")


def bench_steps(report: Report, num_steps: int, batch_sizes: Sequence[int]) -> None:
    largest = batch_sizes[-1]
    cases = {f"decode step, batch {size}": Load(size, num_steps, 10 * num_steps, GREEDY) for size in batch_sizes}
    cases[f"  sampled at random, batch {largest}"] = Load(largest, num_steps, 10 * num_steps, DRAWN)
    cases[f"  requests come and go, batch {largest}"] = Load(largest, 2 * num_steps, 100, GREEDY)
    for case, load in cases.items():
        value = settled_median(serve(InstantRunner, one_by_one, load).host_s) * 1e6
        report.row("scheduler", case, value, "us", TARGET_US, "target", TARGET_US / value)


def bench_overlap(report: Report, num_steps: int, batch_size: int) -> None:
    """The time of a whole step beside a model that leaves the host free."""
    load = Load(batch_size, num_steps, 10 * num_steps, GREEDY)
    step_us = {
        name: settled_median(np.diff(serve(PacedRunner, stepping, load).ends_s).tolist()) * 1e6
        for name, stepping in (("overlapped", overlapped), ("one by one", one_by_one))
    }
    slept_s: list[float] = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        time.sleep(MODEL_S)
        slept_s.append(time.perf_counter() - start_s)
    model_us = settled_median(slept_s) * 1e6
    value, peers = step_us["overlapped"], {"one by one": step_us["one by one"]}
    case = f"whole step, overlapped, batch {batch_size}"
    report.row("scheduler", case, value, "us", model_us, "the model", model_us / value, peers)


def settled_median(seconds: list[float]) -> float:
    return statistics.median(seconds[len(seconds) // 4 :])


def bench_cache(report: Report, rounds: int) -> None:
    """Match, insert and evict a prompt of `NUM_CACHED_PAGES` pages."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, VOCAB_SIZE, NUM_CACHED_PAGES * PAGE_SIZE) for _ in range(rounds)]
    pages = np.arange(NUM_CACHED_PAGES, dtype=np.int32)
    times: dict[str, list[float]] = defaultdict(list)
    for prompt in prompts:
        tree, same = RadixTree(PAGE_SIZE), prompt.copy()
        for name, work in (
            ("insert", partial(tree.insert, prompt, pages)),
            ("match", partial(tree.match, prompt)),
            ("evict", partial(tree.evict, NUM_CACHED_PAGES)),
            ("numpy", partial(np.array_equal, prompt, same)),
            ("xxhash", partial(xxhash.xxh3_64_intdigest, prompt.tobytes())),
        ):
            start_s = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start_s)
    us = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
    for name, limit in (("match", "numpy"), ("insert", "xxhash")):
        report.row("scheduler", f"{name} 1,000 pages", us[name], "us", us[limit], limit, us[limit] / us[name])
    report.row("scheduler", "evict 1,000 pages", us["evict"], "us")


def bench_equal_prompts(report: Report) -> None:
    """Requests with one long prompt that come together: what is computed and held, against the distinct tokens."""
    num_pages = NUM_EQUAL * (EQUAL_LEN // PAGE_SIZE + 4)
    cache = KvCache(
        num_pages=num_pages, page_size=PAGE_SIZE, max_requests=NUM_EQUAL + PROMPT_ROWS, max_tokens_per_request=2**13
    )
    core = local_core(cache, Limits(2**13, VOCAB_SIZE, frozenset(), 8192, NUM_EQUAL))
    prompt = np.random.default_rng(3).integers(0, VOCAB_SIZE, EQUAL_LEN)
    for room in range(1, NUM_EQUAL + 1):
        core.handle(Start(new_request(room, prompt, SamplingParams(max_tokens=8, ignore_eos=True))), 0.0)
    num_tokens = num_held = 0
    while (batch := core.plan(0.0)) is not None:
        num_tokens += int(batch.extend_lens.sum()) if batch.mode is not ForwardMode.DECODE else 0
        num_held = max(num_held, cache.pool.capacity - cache.pool.num_free)
        core.commit(StepResult(np.full(batch.num_samples, 7)), 0.0)
        core.pop_effects()
    case = f"{NUM_EQUAL} equal prompts of {EQUAL_LEN:,} tokens"
    distinct_pages = EQUAL_LEN // PAGE_SIZE + NUM_EQUAL  # each has a page of its own for its output
    report.row("scheduler", f"{case}: computed", num_tokens, "tokens", EQUAL_LEN, "distinct", EQUAL_LEN / num_tokens)
    report.row("scheduler", f"{case}: held", num_held, "pages", distinct_pages, "distinct", distinct_pages / num_held)


def main() -> None:
    args = arguments(__doc__).parse_args()
    with Report(as_json=args.json) as report:
        bench_steps(report, 100 if args.quick else 400, (16, 64, 256))
        bench_overlap(report, 100 if args.quick else 400, 256)
        bench_cache(report, 5 if args.quick else 25)
        bench_equal_prompts(report)


if __name__ == "__main__":
    main()
