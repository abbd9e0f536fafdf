"""What a bootstrap replica costs: instances that it serves at 1 Hz a core, how fast watchers hear of a change, memory,
and how long a restarted replica needs to know everybody again.

A real `diptych bootstrap` process; instances and 50 watchers are in other processes and use real gRPC streams
(`bootstrap_load.py`). What counts is CPU time of the bootstrap process, as the machine may be shared; latencies and
convergence are wall time, and include the time that the other side needs.

Expected before it was measured: gRPC's asyncio server takes most, about 150 us a heartbeat, our own code 30 us; so
about 5,000 instances a core. 50 watchers get all loads once a second, at 500 bytes an instance: 50 MB/s for 2,000
instances, which may cost as much as 500 instances. A change takes a few ms, 100 ms at worst when it meets the loads.
A connection with its stream takes 50 to 100 KiB. Convergence takes the clients' wait before they try again, at most
1 s, and about 1 ms for each connection. The target is 2,000 instances a core.

    python bench/bootstrap.py [--instances N] [--watchers N] [--quick] [--json]
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from report import Report, arguments

from diptych.common.net.ports import free_port
from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.tokens import TOKEN_VARIABLE
from diptych.common.trust.trust import TrustConfig
from diptych.v1.bootstrap_pb2 import WatchRequest
from diptych.v1.bootstrap_pb2_grpc import BootstrapStub

BENCH = "bootstrap"
LOAD = Path(__file__).with_name("bootstrap_load.py")
TARGET = 2000.0  # instances a core
TIMEOUT_S = 120.0


class Bench:
    """A bootstrap process at a port that stays, and processes that load it."""

    def __init__(self, num_instances: int, num_watchers: int, window_s: float) -> None:
        self._num_instances = num_instances
        self._num_watchers = num_watchers
        self._window_s = window_s
        os.environ[TOKEN_VARIABLE] = secrets.token_hex(16)
        self._trust = TrustConfig().trust()
        self._port = free_port()

    def run(self, report: Report) -> None:
        with contextlib.ExitStack() as stack:
            process = self._start_bootstrap(stack)
            self._wait_until_listed(0)
            empty_bytes = process.memory_info().rss
            self._start_load(stack, "instances", self._num_instances)
            self._wait_until_listed(self._num_instances)
            self._measure_cost(report, process, watched=False)
            per_instance = (process.memory_info().rss - empty_bytes) / self._num_instances / 2**10
            report.row(BENCH, f"memory of an instance of {self._num_instances}", per_instance, "KiB")
            watching = self._start_load(stack, "watchers", self._num_watchers, round(self._window_s) + 6)
            time.sleep(3)
            self._measure_cost(report, process, watched=True)
            self._measure_fan_out(report, watching)
            process.kill()
            process.wait()
            self._start_bootstrap(stack)
            self._measure_convergence(report)

    def _measure_cost(self, report: Report, process: psutil.Process, *, watched: bool) -> None:
        """Heartbeats a second of CPU time are instances a core: each sends one a second."""
        beats, before_s, began_s = self._num_heartbeats(), _cpu_s(process), time.monotonic()
        time.sleep(self._window_s)
        cpu_s, wall_s = _cpu_s(process) - before_s, time.monotonic() - began_s
        beats = self._num_heartbeats() - beats
        case = f"{self._num_instances} instances, {self._num_watchers if watched else 'no'} watchers"
        report.row(BENCH, f"{case}: heartbeats", beats / wall_s, "1/s")
        report.row(BENCH, f"{case}: CPU", cpu_s / wall_s * 100, "% of a core")
        per_core = beats / cpu_s
        report.row(BENCH, f"{case}: capacity", per_core, "instances/core", TARGET, "target", per_core / TARGET)

    def _measure_fan_out(self, report: Report, watching: subprocess.Popen[str]) -> None:
        answer = json.loads(watching.communicate(timeout=TIMEOUT_S)[0])
        latencies, expected = sorted(answer["latencies_ms"]), answer["changes"] * self._num_watchers
        case = f"a change to {self._num_watchers} watchers"
        report.row(BENCH, f"{case}, median", statistics.median(latencies), "ms")
        report.row(BENCH, f"{case}, p99", latencies[len(latencies) * 99 // 100], "ms")
        report.row(BENCH, f"{case}, told", len(latencies) / expected * 100, "%")

    def _measure_convergence(self, report: Report) -> None:
        self._wait_until_listed(0)
        began_s = time.monotonic()
        self._wait_until_listed(self._num_instances)
        report.row(BENCH, f"restart: all {self._num_instances} known again", time.monotonic() - began_s, "s")

    def _start_bootstrap(self, stack: contextlib.ExitStack) -> psutil.Process:
        options = ["--host", "0.0.0.0", "--port", str(self._port), "--health-port", "0"]
        command = [sys.executable, "-m", "diptych.cli", "bootstrap", *options, "--log-level", "error"]
        return psutil.Process(stack.enter_context(_running(command)).pid)

    def _start_load(self, stack: contextlib.ExitStack, *words: object) -> subprocess.Popen[str]:
        kind, *rest = map(str, words)
        return stack.enter_context(_running([sys.executable, str(LOAD), kind, str(self._port), *rest]))

    def _num_heartbeats(self) -> int:
        """Return how many the replica has heard, by the sequence numbers of what it lists."""
        with open_sync_channel(f"127.0.0.1:{self._port}", self._trust) as channel:
            snapshot = next(BootstrapStub(channel).Watch(WatchRequest(), timeout=TIMEOUT_S))
            return sum(instance.sequence for instance in snapshot.upserts)

    def _wait_until_listed(self, count: int) -> None:
        """Follow as a watcher does, until so many are listed."""
        with open_sync_channel(f"127.0.0.1:{self._port}", self._trust) as channel:
            listed: set[int] = set()
            request = WatchRequest(without_loads=True)
            for update in BootstrapStub(channel).Watch(request, timeout=TIMEOUT_S, wait_for_ready=True):
                listed.update(instance.instance_id for instance in update.upserts)
                listed.difference_update(update.removed)
                if len(listed) >= count:
                    return


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--instances", type=int, help="default: 2000; 400 with --quick")
    parser.add_argument("--watchers", type=int, default=50)
    options = parser.parse_args()
    num_instances = options.instances or (400 if options.quick else 2000)
    with Report(as_json=options.json) as report:
        Bench(num_instances, options.watchers, window_s=5.0 if options.quick else 20.0).run(report)


if __name__ == "__main__":
    main()
