"""The probes of a real worker process whose bootstrap is away."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.common.net.ports import free_port

pytestmark = pytest.mark.integration

TIMEOUT_S = 200.0  # only for what hangs: machines may be busy
STALL_S = 2.0


class Worker:
    """A prefill worker."""

    def __init__(self, model: Path) -> None:
        self.port, self.health_port = free_port(), free_port()
        options = {
            "model": model,
            "bootstrap": f"127.0.0.1:{free_port()}",
            "device": "sim",
            "kv-cache-mib": 4,
            "port": self.port,
            "health-port": self.health_port,
            "stall-s": STALL_S,
        }
        flags = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        command = (sys.executable, "-m", "diptych.cli", "prefill", *flags)
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def ask(self, name: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.health_port}/health/{name}", timeout=TIMEOUT_S
            ) as answer:
                return answer.status, json.load(answer)["reason"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)["reason"]
        except OSError:
            return 0, "nobody answers"

    def check(self, service: str) -> Any:
        """Without a token."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S).status

    def scheduler(self) -> psutil.Process:
        (scheduler,) = psutil.Process(self.process.pid).children()
        return scheduler

    def has_scheduler(self) -> bool:
        return len(psutil.Process(self.process.pid).children()) == 1


@pytest.fixture
def worker(tiny_folder: Path) -> Iterator[Worker]:
    running = Worker(tiny_folder)
    yield running
    running.process.send_signal(signal.SIGTERM)
    try:
        running.process.wait(TIMEOUT_S)
    finally:
        running.process.kill()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() < begin_s + TIMEOUT_S, what
        time.sleep(0.02)


def test_a_worker_that_loads_lives_and_one_whose_scheduler_is_stopped_does_not(worker: Worker) -> None:
    wait_until(worker.has_scheduler, "the scheduler is started")
    worker.scheduler().suspend()  # before it has loaded anything
    wait_until(lambda: worker.ask("live")[0] == 200, "the health port answers")
    assert worker.ask("startup")[0] == 503
    assert worker.ask("ready") == (503, "the model is loading")
    worker.scheduler().resume()
    wait_until(lambda: worker.ask("startup") == (200, "loaded"), "the model is loaded")
    assert worker.ask("ready") == (503, "no peer is linked yet")
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert [worker.check(name) for name in ("", "readiness", "diptych.v1.Worker")] == [
        serving,
        not_serving,
        not_serving,
    ]

    time.sleep(1.5 * STALL_S)  # idle, without bootstrap and without a peer: what must not happen takes its time
    wait_until(lambda: worker.ask("live") == (200, "every loop runs"), "an idle loop counts as one that runs")

    scheduler = worker.scheduler()
    scheduler.suspend()
    try:
        wait_until(lambda: worker.ask("live")[0] == 503, "a stopped scheduler is noticed")
        stalled = re.fullmatch(r"the step loop has not come round for ([\d.]+) s.*", worker.ask("live")[1])
        assert stalled is not None
        assert float(stalled[1]) >= STALL_S
        assert worker.check("") == not_serving
    finally:
        scheduler.resume()
    wait_until(lambda: worker.ask("live")[0] == 200, "it lives again")
