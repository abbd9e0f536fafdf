"""Workers that freeze, as a whole or in part: others take over, and when they wake they have written nothing wrong.

Nobody can take over from a router: one that freezes is ended, so that its clients hear of it, and started again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import operator
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.v1 import bootstrap_pb2

pytestmark = [pytest.mark.platform, pytest.mark.timeout(600)]

Platform = Any
NUM_TOKENS = 30
STEPS = {"DIPTYCH_SIM_TIMING": "step=10000", "DIPTYCH_MAX_STEP_TOKENS": "16"}  # a prompt takes several
PROMPTS = [[first, *range(100)] for first in range(4)]


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with Engine(str(tiny_folder), EngineOptions(kv_cache_mib=8, device="sim", sim_timing=("none",))) as engine:
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
    return [len(each.load.linked_instances) for each in members] == [2] * 4
