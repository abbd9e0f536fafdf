"""The probes' own port."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import os
import re
import resource
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from diptych.common.errors import ConfigError
from diptych.common.event_loop import LoopHeartbeat
from diptych.common.health.health import (
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_REQUEST_LINE_BYTES,
    HealthServer,
    Page,
    _Head,
)
from diptych.common.verdicts.probes import Probes, Verdict, judge_loops

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


def test_head_is_answered_without_the_body(server: HealthServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    for path, status in [("/health/live", 200), ("/health/ready", 503), ("/metrics", 200), ("/", 404)]:
        connection.request("HEAD", path)
        with connection.getresponse() as answer:
            length = int(answer.headers["content-length"])
            assert (answer.status, length > 0, answer.read()) == (status, True, b"")
    connection.close()


def test_a_probe_that_fails_by_itself_is_not_good(server: HealthServer) -> None:
    status, body = get(server, "/health/startup")
    assert (status, json.loads(body)["reason"]) == (503, "internal error: division by zero")


@pytest.mark.parametrize(
    ("head", "status", "limit"),
    [
        (b"GET /health/live HTTP/1.1\r\nhost: " + b"x" * MAX_REQUEST_LINE_BYTES, 200, b"fine"),
        (b"GET /" + b"x" * MAX_REQUEST_LINE_BYTES, 414, b"at most 8192 bytes"),
        (b"GET /health/live HTTP/1.1\r\nhost: " + b"x" * MAX_HEAD_BYTES, 431, b"at most 32768 bytes"),
        (b"GET /health/live HTTP/1.1\r\n" + b"a: b\r\n" * 100, 431, b"more than 100 headers"),
        (b"GET /health/live HTTP/1.1\r\n" + (b"a: " + b"x" * 1000 + b"\r\n") * 33, 431, b"at most 32768 bytes"),
    ],
    ids=["a long head", "a long line", "a long field", "many fields", "many long fields"],
)
def test_a_head_is_bounded_and_the_refusal_says_how(
    server: HealthServer, head: bytes, status: int, limit: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as connection:
        connection.sendall(head + b"\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # what was not read is dropped with the connection
            while piece := connection.recv(65536):
                answer += piece
    assert int(answer.split()[1]) == status
    assert limit in answer


def test_of_a_head_no_more_is_read_than_it_may_have() -> None:
    sent = io.BytesIO((b"a: " + b"x" * 60_000 + b"\r\n") * 100)
    head = _Head(sent)
    with pytest.raises(http.client.HTTPException, match="at most 32768 bytes"):
        http.client.parse_headers(head)
    assert sent.tell() == MAX_HEAD_BYTES


def test_clients_that_say_nothing_hold_up_nobody_and_are_bounded(server: HealthServer) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) for _ in range(2 * MAX_CONNECTIONS)]
    assert get(server, "/health/live")[0] == 200
    assert [each.recv(1) for each in silent[:MAX_CONNECTIONS]] == [b""] * MAX_CONNECTIONS
    for each in silent:
        each.close()


def test_who_asks_a_byte_at_a_time_is_not_waited_for(server: HealthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.common.health.health.REQUEST_S", 0.3)
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
    silent = re.search(rb"the loop has not come round for ([\d.]+) s", body)
    assert (status, silent is not None and float(silent[1]) >= 0.3) == (503, True)


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(server: HealthServer) -> None:
    with pytest.raises(ConfigError, match="choose another --health-port"):
        HealthServer("127.0.0.1", server.port, Probes(lambda: GOOD, lambda: GOOD, lambda: GOOD))


@pytest.fixture
def no_descriptors(server: HealthServer) -> Iterator[list[socket.socket]]:
    """Nothing more can be opened in this process; two sockets were before, to ask with."""
    asking = [socket.socket() for _ in range(2)]
    held = [os.open(os.devnull, os.O_RDONLY)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 20, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield asking
    finally:
        for each in asking:
            each.close()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_probes_are_answered_when_the_process_has_no_descriptor_left(
    server: HealthServer, no_descriptors: list[socket.socket]
) -> None:
    for each in no_descriptors:  # one after the other
        each.settimeout(TIMEOUT_S)
        each.connect(("127.0.0.1", server.port))
        each.sendall(b"GET /health/live HTTP/1.0\r\n\r\n")
        assert each.recv(12) == b"HTTP/1.0 200"
        while each.recv(4096):
            pass


def test_who_waits_for_a_descriptor_takes_no_processor(
    server: HealthServer, no_descriptors: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[None] = []
    accept = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", lambda listener: tries.append(None) or accept(listener))  # type: ignore[func-returns-value]
    first, second = no_descriptors
    for each in (first, second):
        each.connect(("127.0.0.1", server.port))
    second.settimeout(0.5)
    with pytest.raises(TimeoutError):  # the first has the last descriptor, and asks nothing
        second.recv(1)
    assert len(tries) < 500  # who does not rest tries some 100,000 times
    first.close()
    second.settimeout(TIMEOUT_S)
    second.sendall(b"GET /health/live HTTP/1.0\r\n\r\n")
    assert second.recv(12) == b"HTTP/1.0 200"
