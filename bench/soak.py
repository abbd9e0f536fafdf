"""Runs a scheduler for minutes in a KV pool four times too small, and says whether anything jams, leaks or grows.

The whole loop of a scheduler process, over a null model whose tokens prove that it read the right KV. Requests of
several tenants and priorities come as fast as they are answered; some are aborted, some have short deadlines. It fails
when nothing is answered for a while, an output is wrong, the books do not balance in the end, or memory grew.

    python bench/soak.py --minutes 10
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import zmq
from null_runner import NullRunner, expected_output
from scheduler import local_core, run_loop

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.policies import POLICIES
from diptych.engine.scheduler.messages import outputs_said
from diptych.engine.scheduler.stepping import OverlappedStepping, Stepping, SynchronousStepping, TpModelWorkerClient
from diptych.engine.values.limits import Limits, Scheduling
from diptych.unified.core import UnifiedCore
from diptych.v1 import engine_pb2, inference_pb2, worker_pb2

VOCAB_SIZE, PAGE_SIZE, CONTEXT_LEN = 1000, 4, 512
NUM_OPEN = 64  # requests at once
MEAN_TOKENS = 90  # prompt and output of a request
NUM_PAGES = NUM_OPEN * MEAN_TOKENS // PAGE_SIZE // 4
JAM_S = 20
SETTLED_AFTER = 0.3  # of the time: memory is compared with what it was then
MAX_GROWTH_MIB = 16.0
CHECKED = 0.02  # of the outputs are compared with the model's
OUTPUT_LENS = (1, 2, 5, 20, 60, 150)
TENANTS = ("", "a", "b", "c")


class Client:
    """Keeps `NUM_OPEN` requests open and counts how they end."""

    def __init__(self, socket: zmq.Socket[bytes], seed: int) -> None:
        self._socket = socket
        self._rng = random.Random(seed)
        self._next_room = 1
        self._open: dict[int, tuple[list[int], int, list[int]]] = {}  # prompt, output length, tokens so far
        self.ends: Counter[str] = Counter()
        self.num_tokens = 0
        self.num_wrong = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def top_up(self) -> None:
        commands = engine_pb2.SchedulerCommands()
        while len(self._open) < NUM_OPEN:
            self._add(commands)
        if self._rng.random() < 0.05:
            commands.abort.append(self._rng.choice(list(self._open)))
        if commands.ByteSize():
            self._socket.send(commands.SerializeToString())

    def _add(self, commands: engine_pb2.SchedulerCommands) -> None:
        rng, room = self._rng, self._next_room
        self._next_room += 1
        prompt = [7] * rng.choice([0, 0, 20, 60]) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 60))]
        num_tokens = rng.choice(OUTPUT_LENS)
        self._open[room] = (prompt, num_tokens, [])
        leg = commands.start.add(room=room, prompt_token_ids=prompt, tenant=rng.choice(TENANTS))
        leg.priority = rng.randrange(-2, 3)
        leg.timeout_ms = rng.choice([50, 60_000, 60_000, 60_000])
        leg.sampling.CopyFrom(
            inference_pb2.SamplingParams(max_tokens=num_tokens, temperature=0, top_p=1, ignore_eos=True)
        )

    def receive(self) -> worker_pb2.WorkerStatus | None:
        """Take what the scheduler says. Raises `TimeoutError` when it says nothing."""
        if not self._socket.poll(JAM_S * 1000):
            raise TimeoutError(f"nothing was answered for {JAM_S} s; {len(self._open)} requests are open")
        events = engine_pb2.SchedulerEvents.FromString(self._socket.recv())
        for output in outputs_said(events):
            self._on_output(output)
        return events.status if events.HasField("status") else None

    def _on_output(self, output: worker_pb2.LegOutput) -> None:
        prompt, num_tokens, tokens = self._open[output.room]
        tokens.extend(output.token_ids)
        self.num_tokens += len(output.token_ids)
        if not (output.finish_reason or output.HasField("error")):
            return
        del self._open[output.room]
        self.ends[worker_pb2.ErrorCode.Name(output.error.code) if output.HasField("error") else "finished"] += 1
        if self._rng.random() < CHECKED:
            complete = output.HasField("error") or len(tokens) == num_tokens
            self.num_wrong += not complete or tokens != expected_output(prompt, len(tokens), VOCAB_SIZE)

    def drain(self) -> worker_pb2.WorkerStatus:
        """Wait until everything is answered; return the scheduler's books."""
        while self._open:
            self.receive()
        self._socket.send(engine_pb2.SchedulerCommands(status_query=1).SerializeToString())
        while (status := self.receive()) is None:
            pass
        return status


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(client: Client, core: UnifiedCore, minutes: float) -> float:
    """Run for `minutes`; return by how many MiB memory grew after it had settled."""
    start_s = time.monotonic()
    settled_mib, next_line_s = 0.0, start_s
    while (now_s := time.monotonic()) < start_s + minutes * 60:
        client.top_up()
        client.receive()
        if not settled_mib and now_s > start_s + SETTLED_AFTER * minutes * 60:
            settled_mib = rss_mib()
        if now_s >= next_line_s:
            next_line_s += 30
            print(
                f"{now_s - start_s:6.0f} s  {client.ends.total():8} answered  {client.num_tokens:9} tokens  "
                f"{core.report().counts.retractions:7} retractions  {rss_mib():6.1f} MiB",
                flush=True,
            )
    return rss_mib() - settled_mib


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--overlap", action="store_true", help="plan each step while one runs")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="priority", help="schedule policy")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[UnifiedCore, Stepping, KvCache]:
    cache = KvCache(num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_requests=NUM_OPEN, max_tokens_per_request=CONTEXT_LEN)
    scheduling = Scheduling(args.policy, tenant_weights={"a": 3.0})
    core = local_core(cache, Limits(CONTEXT_LEN, VOCAB_SIZE, frozenset(), 64, NUM_OPEN, scheduling))
    runner = NullRunner(np.zeros((NUM_PAGES, PAGE_SIZE), dtype=np.uint64), VOCAB_SIZE)
    if args.overlap:
        return core, OverlappedStepping(core, TpModelWorkerClient(runner), time.monotonic), cache
    return core, SynchronousStepping(core, runner, time.monotonic), cache


def verdict(client: Client, core: UnifiedCore, status: worker_pb2.WorkerStatus, growth_mib: float) -> int:
    """Print the result; return the exit code."""
    pages = status.pages_by_state.items()
    held = {state: count for state, count in pages if state not in ("free", "cached") and count}
    print(f"ends {dict(client.ends)}; {core.report().counts.retractions} retractions in {NUM_PAGES} pages")
    print(f"wrong outputs {client.num_wrong}, leaks {list(status.problems)}, pages held {held}")
    print(f"memory grew by {growth_mib:.1f} MiB")
    return int(bool(client.num_wrong or status.problems or held or growth_mib > MAX_GROWTH_MIB))


def main() -> int:
    args = parse()
    core, stepping, cache = build(args)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frontend, channel = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    frontend.bind("inproc://soak")
    channel.connect("inproc://soak")
    loop = threading.Thread(target=run_loop, args=(core, stepping, channel, cache), daemon=True)
    loop.start()
    client = Client(frontend, args.seed)
    growth_mib = soak(client, core, args.minutes)
    status = client.drain()
    frontend.send(engine_pb2.SchedulerCommands(shutdown=True).SerializeToString())
    loop.join()
    stepping.close()
    return verdict(client, core, status, growth_mib)


if __name__ == "__main__":
    sys.exit(main())
