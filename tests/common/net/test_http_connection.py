"""What a client's connection may cost, in bytes and in what is parsed; most of it on transports without a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop
from fake_transport import FakeTransport, connect, echo, server_config
from uvicorn.server import ServerState

from diptych.common.net.http_connection import (
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_UNSENT_BYTES,
    MAX_URL_BYTES,
    MAX_WAITING_REQUESTS,
    ConnectionPlaces,
    HttpConnection,
    connections_of_a_server,
)
from diptych.common.net.http_server import _listen

READ_BYTES = 256 * 2**10  # that an event loop hands over at once
FLOOD_BYTES = 40 * 2**20
KEPT_BYTES = 2**20
GET = b"GET / HTTP/1.1\r\nhost: a\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


class CountedParser:
    """A parser, and how many bytes it was given."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._parser.feed_data(data)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 200))


async def _answered(connection: HttpConnection, transport: FakeTransport) -> list[tuple[int, bytes]]:
    """The status and the rest of each answer, once nothing more comes."""
    while connection.tasks:
        await asyncio.wait(connection.tasks)
    connection.connection_lost(None)
    _, *answers = bytes(transport.written).split(b"HTTP/1.1 ")
    return [(int(answer[:3]), answer) for answer in answers]


def answers_to(*pieces: bytes, app: Any = echo) -> list[tuple[int, bytes]]:
    """What a server answers to what comes in these pieces, as long as it has not closed the connection."""

    async def fed() -> list[tuple[int, bytes]]:
        connection, transport = connect(app)
        for piece in pieces:
            if not transport.is_closed:
                connection.data_received(piece)
                await asyncio.sleep(0)
        return await _answered(connection, transport)

    answers: list[tuple[int, bytes]] = run(fed())
    return answers


def statuses(*pieces: bytes) -> list[int]:
    return [status for status, _ in answers_to(*pieces)]


FLOODS: dict[str, tuple[bytes, bytes, int]] = {  # how it begins, how it goes on, and what it is answered with
    "short fields": (GET, b"a:b\r\n", 431),
    "one value": (GET + b"a: ", b"x", 431),
    "one name": (GET, b"a", 431),
    "one URL": (b"GET /", b"x", 414),
    "empty lines before a head": (b"", b"\r\n", 431),
    "an extension of a chunk": (CHUNKED + b"1;", b"x", 431),
    "extensions of many chunks": (CHUNKED, b"1;" + b"x" * 20 + b"\r\ny\r\n", 431),
    "fields behind a body": (CHUNKED + b"0\r\n", b"a:b\r\n", 431),
    "one value behind a body": (CHUNKED + b"0\r\na: ", b"x", 431),
    "requests that wait": (b"", GET + b"\r\n", 200),
}


@pytest.mark.parametrize(("begin", "more", "status"), FLOODS.values(), ids=FLOODS.keys())
def test_a_flood_keeps_little_and_hardly_any_of_it_is_parsed(begin: bytes, more: bytes, status: int) -> None:
    piece = more * (READ_BYTES // len(more))

    async def flood() -> tuple[int, int, list[tuple[int, bytes]]]:
        connection, transport = connect(echo)
        parser = CountedParser(connection.parser)
        connection.parser = parser  # type: ignore[assignment]
        connection.data_received(begin)
        tracemalloc.start()
        for _ in range(FLOOD_BYTES // len(piece)):
            connection.data_received(piece)
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most_bytes, parser.num_bytes, await _answered(connection, transport)

    most_bytes, num_parsed, answers = run(flood())
    assert most_bytes < KEPT_BYTES
    assert num_parsed <= READ_BYTES + MAX_HEAD_BYTES
    assert answers[0][0] == status
    assert b"connection: close" in answers[-1][1]


def head_of(num_bytes: int) -> bytes:
    return GET + b"a: " + b"x" * (num_bytes - len(GET) - 7) + b"\r\n\r\n"


def fields(number: int) -> bytes:
    return b"".join(b"f%d: x\r\n" % at for at in range(number))


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (head_of(MAX_HEAD_BYTES), 200),
        (head_of(MAX_HEAD_BYTES + 1), 431),
        (GET + fields(MAX_FIELDS - 1) + b"\r\n", 200),
        (GET + fields(MAX_FIELDS) + b"\r\n", 431),
        (b"GET /" + b"x" * (MAX_URL_BYTES - 1) + b" HTTP/1.1\r\n\r\n", 200),
        (b"GET /" + b"x" * MAX_URL_BYTES + b" HTTP/1.1\r\n\r\n", 414),
        (CHUNKED + b"1\r\nx\r\n0\r\n" + fields(MAX_FIELDS - 2) + b"\r\n", 200),
        (CHUNKED + b"1\r\nx\r\n0\r\n" + fields(MAX_FIELDS - 1) + b"\r\n", 431),
        (b"what is this\r\n\r\n", 400),
    ],
    ids=["a long head", "a longer one", "fields", "more", "a URL", "a longer one", "behind a body", "more", "garbage"],
)
def test_a_head_may_be_as_long_as_its_limits_and_no_longer(request_bytes: bytes, status: int) -> None:
    at_once, (second, words) = statuses(request_bytes), answers_to(request_bytes[:20], request_bytes[20:])[0]
    assert (at_once, second) == ([status], status)
    limits = {431: b"at most 32768 bytes and 100 fields", 414: b"at most 8192 bytes", 400: b"Invalid", 200: b""}
    assert limits[status] in words
    byte_by_byte = [bytes([each]) for each in request_bytes]
    assert statuses(*byte_by_byte) == [status]


@pytest.mark.parametrize(
    ("request_bytes", "status", "words"),
    [
        (b"what is this\r\n\r\n", 400, "Invalid HTTP request received."),
        (GET + fields(MAX_FIELDS) + b"\r\n", 431, "at most 32768 bytes and 100 fields"),
        (b"GET /" + b"x" * MAX_URL_BYTES + b" HTTP/1.1\r\n\r\n", 414, "at most 8192 bytes"),
    ],
)
def test_what_is_no_request_is_told_in_the_shape_of_every_other_error(
    request_bytes: bytes, status: int, words: str
) -> None:
    ((found, answer),) = answers_to(request_bytes)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert (found, b"content-type: application/json" in head) == (status, True)
    assert b"content-length: %d" % len(body) in head
    error = json.loads(body)["error"]
    assert words in error["message"]
    assert {**error, "message": ""} == {"message": "", "type": "invalid_request_error", "param": None, "code": None}


async def stream(scope: Any, receive: Any, send: Any) -> None:
    """Answer in two pieces, and say of no length."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"one ", "more_body": True})
    await send({"type": "http.response.body", "body": b"two", "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    ("app", "method", "body"),
    [(stream, b"GET", b"one two"), (stream, b"HEAD", b""), (echo, b"GET", b"0"), (echo, b"HEAD", b"")],
)
def test_an_answer_in_http_1_0_ends_with_its_connection_and_has_no_chunks(app: Any, method: bytes, body: bytes) -> None:
    async def fed() -> tuple[bytes, bool]:
        connection, transport = connect(app)
        connection.data_received(method + b" / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        await asyncio.wait(connection.tasks)
        is_closed = transport.is_closed
        connection.connection_lost(None)
        return bytes(transport.written), is_closed

    written, is_closed = run(fed())
    head, _, rest = written.partition(b"\r\n\r\n")
    assert (rest, is_closed) == (body, True)
    assert (b"transfer-encoding" in head, b"connection: close" in head) == (False, True)
    assert (b"content-length: 1" in head) is (app is echo)


def test_an_answer_in_http_1_1_that_tells_no_length_has_chunks() -> None:
    ((_, answer),) = answers_to(GET + b"\r\n", app=stream)
    assert answer.endswith(b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n")


def test_each_request_of_a_connection_has_the_whole_room() -> None:
    heads = [head_of(MAX_HEAD_BYTES), head_of(MAX_HEAD_BYTES), b"\r\n" + head_of(1000), head_of(MAX_HEAD_BYTES)]
    assert statuses(*heads) == [200] * 4


def test_a_body_may_come_in_chunks_of_one_byte_and_costs_what_its_bytes_cost() -> None:
    """No more than one object for what came together, whatever the chunks are."""
    num_chunks, messages = 100_000, 0

    async def count(scope: Any, receive: Any, send: Any) -> None:
        async def counted() -> Any:
            nonlocal messages
            messages += 1
            return await receive()

        await echo(scope, counted, send)

    chunks = b"1\r\nx\r\n" * num_chunks
    pieces = [chunks[at : at + READ_BYTES] for at in range(0, len(chunks), READ_BYTES)]
    answers = answers_to(CHUNKED, *pieces, b"0\r\n\r\n", app=count)
    assert [(status, answer.rpartition(b"\r\n")[2]) for status, answer in answers] == [(200, b"%d" % num_chunks)]
    assert messages <= len(pieces) + 2


def test_a_long_body_has_no_part_in_the_room_of_a_head() -> None:
    body = b"x" * 2**20
    length = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert answers_to(length + body)[0][1].endswith(b"%d" % len(body))


def test_what_comes_behind_a_body_is_no_field_of_its_head() -> None:
    seen: list[Any] = []

    async def keep(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        seen.extend(scope["headers"])

    assert answers_to(CHUNKED + b"1\r\nx\r\n0\r\nauthorization: me\r\n\r\n", app=keep)[0][0] == 200
    assert dict(seen).keys() == {b"host", b"transfer-encoding"}


def test_requests_that_are_sent_together_are_answered_as_far_as_they_may_wait_and_the_last_answer_says_that_it_is() -> (
    None
):
    allowed = MAX_WAITING_REQUESTS + 1
    assert statuses((GET + b"\r\n") * allowed) == [200] * allowed
    answers = answers_to((GET + b"\r\n") * 3 * allowed)
    assert [status for status, _ in answers] == [200] * allowed
    assert [b"connection: close" in answer for _, answer in answers] == [False] * (allowed - 1) + [True]


def test_a_head_that_is_refused_takes_nothing_from_the_answer_before_it() -> None:
    (first, words), *others = answers_to(GET + b"\r\n" + GET + fields(MAX_FIELDS) + b"\r\n")
    assert (first, others) == (200, [])
    assert words.endswith(b"connection: close\r\n\r\n0")


def test_a_body_that_is_refused_while_its_request_waits_is_answered_in_its_turn() -> None:
    sent = 2 * (GET + b"\r\n") + CHUNKED
    assert statuses(sent, b"what is this") == [200, 200, 400]
    assert statuses(sent + b"1;" + b"x" * 2 * MAX_HEAD_BYTES) == [200, 200, 431]


def test_a_body_that_is_refused_has_one_answer_and_its_reader_hears_that_it_ends() -> None:
    heard: list[str] = []

    async def reader(scope: Any, receive: Any, send: Any) -> None:
        while not heard or heard[-1] != "http.disconnect":
            heard.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 500, "headers": []})

    answers = answers_to(CHUNKED, b"1;" + b"x" * 2 * MAX_HEAD_BYTES, app=reader)
    assert [status for status, _ in answers] == [431]
    assert heard == ["http.disconnect"]


def test_more_connections_than_places_end_those_that_have_waited_longest_for_a_request() -> None:
    async def ended() -> list[bool]:
        kind, never = connections_of_a_server(60, 3), asyncio.Event()

        async def wait(scope: Any, receive: Any, send: Any) -> None:
            await never.wait()
            await echo(scope, receive, send)

        pairs = [connect(wait, kind) for _ in range(3)]
        pairs[0][0].data_received(GET + b"\r\n")
        pairs[1][0].data_received(GET)
        pairs += [connect(wait, kind) for _ in range(2)]
        closed = [transport.is_closed for _, transport in pairs]
        never.set()
        for pair in pairs:
            await _answered(*pair)
        return closed

    assert run(ended()) == [False, True, True, False, False]


def test_where_all_connections_have_a_request_a_newcomer_is_told_to_try_again() -> None:
    async def told() -> tuple[list[bool], bytes, list[tuple[int, bytes]]]:
        kind, never = connections_of_a_server(60, 1), asyncio.Event()

        async def wait(scope: Any, receive: Any, send: Any) -> None:
            await never.wait()
            await echo(scope, receive, send)

        busy, busy_transport = connect(wait, kind)
        busy.data_received(GET + b"\r\n")
        newcomer, transport = connect(wait, kind)
        newcomer.data_received(GET + b"\r\n")
        newcomer.connection_lost(None)
        never.set()
        closed = [busy_transport.is_closed, transport.is_closed]
        return closed, bytes(transport.written), await _answered(busy, busy_transport)

    closed, words, answers = run(told())
    assert (closed, [status for status, _ in answers]) == ([False, True], [200])
    assert words.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in words


def test_a_connection_sends_at_once_and_leaves_little_in_the_kernel() -> None:
    """Under the loop that routers run on. With Nagle's algorithm a second small write waits up to 44 ms."""

    async def accepted() -> tuple[int, int]:
        seen: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()

        class Seen(HttpConnection):
            stall_s, places = 60, ConnectionPlaces(1)

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                options = (socket.TCP_NODELAY, socket.TCP_NOTSENT_LOWAT)
                accepted_socket = transport.get_extra_info("socket")
                no_delay, unsent = (accepted_socket.getsockopt(socket.IPPROTO_TCP, option) for option in options)
                seen.set_result((no_delay, unsent))

        config, listener = server_config(echo), _listen("127.0.0.1", 0)
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: Seen(config, ServerState(), {}), sock=listener):
            with socket.create_connection(listener.getsockname()):
                return await asyncio.wait_for(seen, 60)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(accepted()) == (1, MAX_UNSENT_BYTES)


def test_a_client_that_connects_and_says_nothing_is_cut_off_like_one_that_is_silent_between_requests() -> None:
    async def bytes_until_the_end() -> bytes:
        config, kind = server_config(echo), connections_of_a_server(60, 16)
        config.timeout_keep_alive = 1
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: kind(config, ServerState(), {}), "127.0.0.1", 0)
        async with server, asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            everything = await reader.read()
            writer.close()
            return everything

    assert asyncio.run(bytes_until_the_end()) == b""
