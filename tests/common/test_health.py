"""The probes' own port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from diptych.common.errors import ConfigError
from diptych.common.health import MAX_CONNECTIONS, HealthServer, Page
from diptych.common.heartbeat import LoopHeartbeat
from diptych.common.probes import Probes, Verdict, judge_loops

TIMEOUT_S = 60.0
GOOD, BAD = Verdict(True, "fine"), Verdict(False, "it sleeps")


@pytest.fixture
def server() -> Iterator[HealthServer]:
    pages = {"/metrics": lambda: Page(200, "text/plain", b"a 1\n")}
    with HealthServer("127.0.0.1", 0, Probes(lambda: GOOD, lambda: BAD, lambda: 1 / 0), pages) as running:  # type: ignore[arg-type,return-value]
        yield running


def get(server: HealthServer, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_a_verdict_is_a_status_and_a_reason(server: HealthServer) -> None:
    status, body = get(server, "/health/live?verbose")
    assert (status, json.loads(body)) == (200, {"status": "ok", "reason": "fine"})
    status, body = get(server, "/health/ready")
    assert (status, json.loads(body)) == (503, {"status": "failing", "reason": "it sleeps"})


def test_further_pages_are_served_and_others_are_not(server: HealthServer) -> None:
    assert get(server, "/metrics") == (200, b"a 1\n")
    status, body = get(server, "/")
    assert (status, b"/health/live" in body) == (404, True)


def test_a_probe_that_fails_by_itself_is_not_good(server: HealthServer) -> None:
    status, body = get(server, "/health/startup")
    assert (status, json.loads(body)["reason"]) == (503, "internal error: division by zero")


def test_clients_that_say_nothing_hold_up_nobody_and_are_bounded(server: HealthServer) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) for _ in range(2 * MAX_CONNECTIONS)]
    assert get(server, "/health/live")[0] == 200
    assert [each.recv(1) for each in silent[:MAX_CONNECTIONS]] == [b""] * MAX_CONNECTIONS
    for each in silent:
        each.close()


def test_who_asks_a_byte_at_a_time_is_not_waited_for(server: HealthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.common.health.REQUEST_S", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), 0.05) as slow:
        deadline_s, answer = time.monotonic() + TIMEOUT_S, None
        while answer is None and time.monotonic() < deadline_s:
            with contextlib.suppress(BrokenPipeError):
                slow.send(b"G")
            with contextlib.suppress(TimeoutError):
                answer = slow.recv(1)
    assert answer == b""


def test_a_loop_that_is_stuck_delays_no_answer_and_is_told() -> None:
    async def stuck() -> tuple[int, bytes]:
        heartbeat = LoopHeartbeat()
        beating = asyncio.create_task(heartbeat.run())

        def live() -> Verdict:
            return judge_loops({"the loop": time.monotonic() - heartbeat.last_s}, stall_s=0.3)

        with HealthServer("127.0.0.1", 0, Probes(live, live, live)) as server:
            await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251  # what is never to happen
            with ThreadPoolExecutor() as other:
                answer = other.submit(get, server, "/health/live").result(TIMEOUT_S)
        beating.cancel()
        return answer

    status, body = asyncio.run(stuck())
    assert (status, b"the loop has not come round for 0." in body) == (503, True)


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(server: HealthServer) -> None:
    with pytest.raises(ConfigError, match="choose another --health-port"):
        HealthServer("127.0.0.1", server.port, Probes(lambda: GOOD, lambda: GOOD, lambda: GOOD))
