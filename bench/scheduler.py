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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zmq
from report import Report, arguments

from diptych.engine.aggregated import AggregatedCore
from diptych.engine.batch import ForwardBatch, ForwardMode, SamplingBatch, StepResult
from diptych.engine.kv_cache import KvCache
from diptych.engine.limits import Limits, Scheduling
from diptych.engine.lora.registry import LoraRegistry
from diptych.engine.radix import RadixTree
from diptych.engine.runtime.adapters import Adapters
from diptych.engine.runtime.admin_thread import AdminThread
from diptych.engine.runtime.grammar_thread import GrammarThread
from diptych.engine.runtime.links import NoLinks
from diptych.engine.runtime.loop import SchedulerLoop
from diptych.engine.runtime.stepping import Stepping, SynchronousStepping
from diptych.v1 import engine_pb2, inference_pb2, worker_pb2

TARGET_US = 500.0
PAGE_SIZE = 16
PROMPT_LEN = 100
VOCAB_SIZE = 32_000
CONTEXT_LEN = 4096
NUM_CACHED_PAGES = 1000


class InstantRunner:
    """Answers at once; notes how long its caller was busy before each decode step, and calls `stop` after enough."""

    def __init__(self, num_steps: int, stop: Callable[[], None]) -> None:
        self.host_s: list[float] = []
        self._num_steps = num_steps
        self._stop = stop
        self._rng = np.random.default_rng(0)
        self._left_s = time.perf_counter()

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        if batch.mode is ForwardMode.DECODE:
            self.host_s.append(time.perf_counter() - self._left_s)
            if len(self.host_s) == self._num_steps:
                self._stop()
        result = StepResult(self._rng.integers(0, VOCAB_SIZE, len(batch.sample_rows)))
        self._left_s = time.perf_counter()
        return result


def host_s(batch_size: int, num_steps: int, sampling: inference_pb2.SamplingParams, output_len: int) -> list[float]:
    """Return the scheduler's own time before each of `num_steps` steps that decode `batch_size` requests.

    With outputs shorter than the run, requests end and others take their place; their steps are counted too.
    """
    num_pages = batch_size * (PROMPT_LEN + output_len + 1) // PAGE_SIZE * 2 + 2
    cache = KvCache(
        num_pages=num_pages, page_size=PAGE_SIZE, max_requests=batch_size, max_tokens_per_request=CONTEXT_LEN
    )
    core = AggregatedCore(
        cache, Limits(CONTEXT_LEN, VOCAB_SIZE, frozenset({2}), 8192, batch_size, Scheduling(max_waiting=10**6))
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frontend, channel = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (frontend, channel):
        socket.set_hwm(0)
    frontend.bind("inproc://scheduler")
    channel.connect("inproc://scheduler")
    for commands in start_commands(batch_size * (2 + num_steps // output_len), sampling, output_len):
        frontend.send(commands.SerializeToString())
    runner = InstantRunner(
        num_steps, lambda: frontend.send(engine_pb2.SchedulerCommands(shutdown=True).SerializeToString())
    )
    run_loop(core, SynchronousStepping(core, runner, time.monotonic), channel, cache)
    for socket in (frontend, channel):
        socket.close(linger=0)
    context.term()
    return runner.host_s


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


def run_loop(core: AggregatedCore, stepping: Stepping, channel: zmq.Socket[bytes], cache: KvCache) -> None:
    """Run a scheduler's loop until the other end of `channel` says shutdown."""
    grammars = GrammarThread(no_compiler)
    adapters: Adapters[Any] = Adapters(LoraRegistry(1, ""), NoSlots(), no_adapter)
    admin = AdminThread(adapters.handlers)
    loop = SchedulerLoop(
        core, stepping, channel, NoLinks(), grammars, admin, adapters, cache=cache, max_tokens=CONTEXT_LEN
    )
    loop.run()
    grammars.close()
    admin.close()


class NoSlots:
    """No model, no adapters."""

    def install(self, slot: int, weights: Any) -> None: ...

    def remove(self, slot: int) -> None: ...


def no_adapter(path: Path) -> Any:
    raise AssertionError("nobody asks for an adapter")


def no_compiler() -> Any:
    raise AssertionError("nobody asks for a grammar")


def bench_steps(report: Report, num_steps: int, batch_sizes: Sequence[int]) -> None:
    greedy = inference_pb2.SamplingParams(temperature=0, top_p=1, ignore_eos=True)
    drawn = inference_pb2.SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=1)
    for batch_size in batch_sizes:
        row(report, f"decode step, batch {batch_size}", host_s(batch_size, num_steps, greedy, 10 * num_steps))
    largest = batch_sizes[-1]
    row(report, f"  sampled at random, batch {largest}", host_s(largest, num_steps, drawn, 10 * num_steps))
    row(report, f"  requests come and go, batch {largest}", host_s(largest, 2 * num_steps, greedy, 100))


def row(report: Report, case: str, seconds: list[float]) -> None:
    value = statistics.median(seconds[len(seconds) // 4 :]) * 1e6
    report.row("scheduler", case, value, "us", TARGET_US, "target", TARGET_US / value)


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


def main() -> None:
    args = arguments(__doc__).parse_args()
    with Report(as_json=args.json) as report:
        bench_steps(report, 100 if args.quick else 400, (16, 64, 256))
        bench_cache(report, 5 if args.quick else 25)


if __name__ == "__main__":
    main()
