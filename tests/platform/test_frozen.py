"""Workers that freeze, as a whole or in part: others take over, and when they wake they have written nothing wrong.

Nobody can take over from a router: one that freezes is ended, so that its clients hear of it, and started again.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import operator
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.cli.reports.status_report import Report, as_text
from diptych.cli.requests.asking import ask
from diptych.engine import Engine, SamplingParams
from diptych.v1 import bootstrap_pb2

Platform = Any
NUM_TOKENS = 30
STEPS = {"DIPTYCH_SIM_TIMING": "step=10000", "DIPTYCH_MAX_STEP_TOKENS": "16"}  # a prompt takes several
PROMPTS = [[first, *range(100)] for first in range(4)]


@pytest.fixture(scope="module")
def expected(tiny_folder: Path, reference: Callable[..., Engine]) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    engine = reference(tiny_folder, device="sim", sim_timing=("none",))
    return [each.token_ids for each in engine.generate_batch(PROMPTS, params)]


@pytest.fixture(scope="module")
def platform(start_shared: Callable[..., Platform], tiny_folder: Path) -> Platform:
    """What freezes has a prompt half written, or an answer half said: nearly all the time goes by in steps."""
    return start_shared(prefill=2, decode=2, options=("--model", str(tiny_folder), "--device", "sim"), **STEPS)


class Clients:
    """Ask the same questions again and again; every answer must be right."""

    def __init__(self, platform: Platform, expected: list[tuple[int, ...]]) -> None:
        self._platform = platform
        self._expected = expected
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(len(PROMPTS))]
        self.num_right = [0] * len(PROMPTS)
        self.wrong: list[Any] = []

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for_more(self, wait_until: Callable[..., Any]) -> None:
        """Wait for two more answers to each: the first may have been under way before."""
        wanted = [each + 2 for each in self.num_right]
        wait_until(lambda: self.wrong or all(map(operator.ge, self.num_right, wanted)), 200.0, "an answer to everybody")

    def _run(self, number: int) -> None:
        body = {"model": "", "prompt": PROMPTS[number], "max_tokens": NUM_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        while not self._stop.is_set():
            status, answer = self._platform.post("/v1/completions", {**body, "cache_salt": str(time.monotonic())})
            if status == 200 and tuple(answer["choices"][0]["token_ids"]) == self._expected[number]:
                self.num_right[number] += 1
            else:
                self.wrong.append(answer)


@pytest.mark.parametrize(("part", "victim"), [("worker", "prefill"), ("scheduler", "decode")])
def test_what_freezes_costs_no_request_and_harms_nothing_when_it_wakes(
    platform: Platform, expected: list[tuple[int, ...]], victim: str, part: str, wait_until: Callable[..., Any]
) -> None:
    worker = platform.components(victim)[0]
    frozen = worker.children() if part == "scheduler" else [worker, *worker.children()]
    with Clients(platform, expected) as clients:
        clients.wait_for_more(wait_until)
        for process in frozen:
            process.send_signal(signal.SIGSTOP)
        try:
            clients.wait_for_more(wait_until)
        finally:
            for process in frozen:
                with contextlib.suppress(psutil.NoSuchProcess):  # one that freezes for a minute is ended
                    process.send_signal(signal.SIGCONT)
        wait_until(lambda: all_linked(platform), 200.0, "all are linked again")
        clients.wait_for_more(wait_until)
    assert clients.wrong == []
    platform.assert_clean()


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()  # SIGSTOP
    try:
        yield
    finally:
        process.resume()


@contextlib.contextmanager
def hanging(process: psutil.Process) -> Iterator[None]:
    """Hold its main thread alone, as a debugger does: it is not stopped, and its other threads go on."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    seize, interrupt, detach = 0x4206, 0x4207, 17
    if ptrace(seize, process.pid, None, None):
        pytest.skip("no process can be held here")
    assert ptrace(interrupt, process.pid, None, None) == 0
    try:
        yield
    finally:
        assert ptrace(detach, process.pid, None, None) == 0


@pytest.mark.parametrize("freezing", [stopped, hanging])
def test_a_scheduler_that_does_not_come_round_is_told_of_and_gets_nothing_new_until_it_does(
    platform: Platform, freezing: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    worker = next(each for each in platform.instances() if each.role == bootstrap_pb2.ROLE_DECODE)
    name, (scheduler,) = f"{worker.instance_id:016x}", platform.process_of("decode", worker).children()
    with freezing(scheduler):
        wait_until(lambda: name in silent(platform), 200.0, "the console says that it is silent")
        assert "does not answer: the scheduler has been silent for" in status_of(platform, name)
        num_legs = known(platform)[name]["open_legs"]
        with ThreadPoolExecutor(6) as threads:
            answers = [threads.submit(platform.complete, PROMPTS[0], cache_salt=str(each)) for each in range(6)]
            assert all(each.result()["choices"] for each in answers)
        assert name in silent(platform)  # on a busy machine others may be, too, for a moment
        assert known(platform)[name]["open_legs"] == num_legs
    wait_until(lambda: name not in silent(platform) and known(platform)[name]["is_connected"], 200.0, "it is heard")
    wait_until(lambda: all_linked(platform), 200.0, "all are linked again")
    wait_until(lambda: "silent" not in status_of(platform, name), 200.0, "it says so itself")
    platform.assert_clean()


def test_a_router_that_freezes_is_ended_so_that_its_clients_hear_of_it_and_started_again(
    platform: Platform, wait_until: Callable[..., Any]
) -> None:
    (router,) = platform.components("router")
    body = json.dumps({"prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True})
    with contextlib.closing(connect(platform)) as streaming, contextlib.closing(connect(platform)) as sending:
        streaming.request("POST", "/v1/completions", body)
        answer = streaming.getresponse()
        assert answer.readline().startswith(b"data: ")
        sending.putrequest("POST", "/v1/completions")
        sending.putheader("content-length", "100000")
        sending.endheaders(b"{")
        router.suspend()
        with contextlib.suppress(ConnectionError, http.client.IncompleteRead):  # all may have been on its way before
            answer.read()
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            sending.getresponse()
    assert "router was ended: it froze: its event loop has not come round for" in platform.log.read_text()
    wait_until(lambda: [each.pid for each in platform.components("router")] not in ([], [router.pid]), 200.0, "another")
    platform.wait_until_ready()
    assert len(platform.complete(PROMPTS[1], ignore_eos=True)["choices"][0]["text"]) > 0
    platform.assert_clean()


def connect(platform: Platform) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", platform.http_port, timeout=200)


def all_linked(platform: Platform) -> bool:
    members = [each for each in platform.instances() if each.role != bootstrap_pb2.ROLE_ROUTER]
    return sorted(len(each.load.linked_instances) for each in members) == [3, 3, 3, 3]


def known(platform: Platform) -> dict[str, Any]:
    """The workers as the router knows them, by name."""
    return {each["instance"]: each for each in fetch(platform, "/admin/workers")["workers"]}


def silent(platform: Platform) -> list[str]:
    """Those of which the console says that nothing is heard."""
    return [name for name, card in fetch(platform, "/console/api/fleet")["workers"].items() if card["silent_s"] > 0]


def status_of(platform: Platform, name: str) -> str:
    """What `diptych status` prints of a worker."""
    (member,) = [each for each in platform.instances() if f"{each.instance_id:016x}" == name]
    return as_text(Report([ask(member, platform.trust(), 100.0)]))


def fetch(platform: Platform, path: str) -> Any:
    request = urllib.request.Request(platform.url + path, headers=dict(platform.trust().metadata()))
    with urllib.request.urlopen(request, timeout=200) as answer:
        return json.load(answer)
