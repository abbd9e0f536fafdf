"""Members of a running platform leave one after another under streams, by signal, command and HTTP; nobody notices."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from greedy_streams import greedy_stream

from diptych.common.trust.trust import TrustConfig

Platform = Any  # the fixture's class: test helpers can't be imported

PROMPTS = [[number, *range(5, 40)] for number in range(8)]
NUM_TOKENS = 300  # of 4 ms each: a stream which has begun runs for a second and more
NUM_CLIENTS = 8


@pytest.fixture(scope="module")
def platform(
    platform_class: Callable[..., Platform],
    tiny_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Platform]:
    log = tmp_path_factory.mktemp("platform") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIPTYCH_POLICY", "least_load")  # each worker has streams when it leaves
        running = platform_class(log, prefill=2, decode=2, options=("--model", str(tiny_folder), "--device", "sim"))
    yield running
    running.stop()


def answers_of(platform: Platform) -> list[list[int]]:
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return list(pool.map(partial(greedy_stream, platform, num_tokens=NUM_TOKENS), PROMPTS))


@contextmanager
def traffic(platform: Platform, expected: list[list[int]]) -> Iterator[None]:
    """Keep streams running around what is done inside, one after another from each client; all must be as expected."""
    begun = threading.Semaphore(0)
    over = threading.Event()

    def ask(client: int) -> None:
        number = client % len(PROMPTS)
        while not over.is_set():
            assert greedy_stream(platform, PROMPTS[number], NUM_TOKENS, begun.release) == expected[number]

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(ask, client) for client in range(NUM_CLIENTS)]
        try:
            for _ in clients:
                assert begun.acquire(timeout=200)
            yield
        finally:
            over.set()
        for client in clients:
            client.result()


@contextmanager
def frozen(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def of_role(platform: Platform, role: str) -> list[Any]:
    from diptych.v1 import bootstrap_pb2

    return [each for each in platform.statuses() if each.instance.role == bootstrap_pb2.Role.Value(role)]


def diptych(platform: Platform, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diptych.cli", *arguments, "--bootstrap", f"127.0.0.1:{platform.bootstrap_port}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def http_drain(address: str, method: str, headers: dict[str, str], query: str = "") -> tuple[int, Any]:
    request = urllib.request.Request(f"http://{address}/drain{query}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=200) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_members_leave_under_streams_and_nobody_notices(platform: Platform, wait_until: Callable[..., Any]) -> None:
    expected = answers_of(platform)

    def log() -> str:
        return str(platform.log.read_text())

    leaving = platform.components("decode")[0]
    with traffic(platform, expected):
        with frozen(leaving.children()):  # no stream ends meanwhile
            leaving.send_signal(signal.SIGTERM)
            wait_until(lambda: "draining: " in log(), 200.0, "it drains")
            leaving.send_signal(signal.SIGTERM)  # it had 5 s to let streams finish, but for this
            wait_until(
                lambda: "no more time for " in log(), 200.0, "it hands back"
            )  # before they can end by themselves
        leaving.wait(200)
    wait_until(lambda: "it is not started again" in log(), 200.0, "the supervisor lets it go")
    wait_until(lambda: len(of_role(platform, "ROLE_DECODE")) == 1, 200.0, "it has left the membership")

    prefill = of_role(platform, "ROLE_PREFILL")[0].instance
    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(lambda: [greedy_stream(platform, prompt, NUM_TOKENS) for prompt in PROMPTS[:3]])
        done = diptych(platform, "drain", f"{prefill.instance_id:016x}", "--deadline-s", "0.2")
        assert (done.returncode, done.stdout.splitlines()[-1].endswith(": empty")) == (0, True), done
        assert outputs.result() == expected[:3]
    report = json.loads(diptych(platform, "status", "--json").stdout)
    state = {member["instance_id"]: member["state"] for member in report["members"]}
    assert state.pop(f"{prefill.instance_id:016x}") == "empty"
    assert set(state.values()) == {"ready"}

    decode = of_role(platform, "ROLE_DECODE")[0].instance
    assert http_drain(decode.metrics_address, "POST", {})[0] == 401
    token = dict(TrustConfig().trust().metadata())
    assert http_drain(decode.metrics_address, "GET", token)[1]["phase"] == "serving"
    assert http_drain(decode.metrics_address, "POST", token, "?deadline_s=0")[0] == 202
    wait_until(lambda: http_drain(decode.metrics_address, "GET", token)[1]["phase"] == "empty", 200.0, "it is empty")
    wait_until(lambda: not platform.is_ready(), 200.0, "the router has heard of it")
    platform.assert_clean()
    lines = platform.metrics().splitlines()
    [handed_back] = [line for line in lines if line.startswith("diptych_router_handed_back_total")]
    assert float(handed_back.split()[1]) >= 1
    retries = [line for line in lines if line.startswith("diptych_router_retries_total{")]
    assert {line for line in retries if "peer_lost" not in line} == set()  # who is frozen for long is lost to its peers
