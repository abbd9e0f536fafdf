"""Viewers of one of several processes, over real sockets: the first process looks for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.requests import Request

from diptych.router.http.console.relay import FirstProcess

Stream = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
OWN = "this process looks itself"


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


@asynccontextmanager
async def first_process(serve: Stream) -> Any:
    """Yield where it listens, and an event that says that nobody reads any more."""
    is_left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # who asks may leave before it has asked
            await serve(await reader.readuntil(b"\r\n\r\n"), writer)
            await reader.read()
        is_left.set()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[:2], is_left


class Viewer:
    """A client of the second process."""

    def __init__(self, method: str = "GET") -> None:
        self.scope = {
            "type": "http",
            "method": method,
            "path": "/console/api/stream",
            "query_string": b"topics=fleet,steps",
            "headers": [
                (b"host", b"console.example"),
                (b"authorization", b"Bearer me"),
                (b"connection", b"keep-alive"),
            ],
        }
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.leaves = asyncio.Event()

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def looks(self, first: FirstProcess) -> None:
        stream = await first.stream(Request(self.scope, self.receive))
        if stream is None:
            self.sent.put_nowait(OWN)
        else:
            await stream(self.scope, self.receive, self.sent.put)

    def told(self) -> list[Any]:
        return [self.sent.get_nowait() for _ in range(self.sent.qsize())]


def answer_of(*parts: bytes) -> list[Any]:
    """What a viewer is told by a second process when the first one writes `parts` and closes."""

    async def run() -> list[Any]:
        async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
            writer.writelines(parts)
            writer.close()

        viewer = Viewer()
        async with first_process(serve) as (address, _):
            await viewer.looks(FirstProcess(address))
        return viewer.told()

    return asyncio.run(run())


def test_events_of_the_first_process_come_as_they_are_made_and_it_hears_who_asks() -> None:
    async def run() -> None:
        asked = asyncio.Queue[Any]()

        async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(SSE)
            asked.put_nowait((head, writer))

        viewer = Viewer()
        async with first_process(serve) as (address, is_left):
            looking = asyncio.ensure_future(viewer.looks(FirstProcess(address)))
            head, writer = await asked.get()
            assert head.startswith(b"GET /console/api/stream?topics=fleet,steps HTTP/1.1\r\n")
            assert b"authorization: Bearer me\r\n" in head
            assert b"host: console.example\r\n" in head
            assert head.endswith(b"connection: close\r\n\r\n")
            assert b"keep-alive" not in head
            start = await viewer.sent.get()
            assert (start["status"], start["headers"]) == (200, [(b"content-type", b"text/event-stream")])
            for event in (b"event: ping\n\n", b"event: patch\n\n"):
                writer.write(chunk(event))
                assert (await viewer.sent.get())["body"] == event
            viewer.leaves.set()
            await looking
            await is_left.wait()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_stream_that_ends_or_is_cut_off_ends() -> None:
    for end in (b"0\r\n\r\n", b""):
        start, *bodies, last = answer_of(SSE, chunk(b"event: ping\n\n"), end)
        assert (start["status"], last["more_body"]) == (200, False), end
        assert b"".join(each["body"] for each in bodies) == b"event: ping\n\n", end


def test_a_refusal_of_the_first_process_is_the_answer() -> None:
    start, body, *_ = answer_of(b"HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Bearer\r\ncontent-length: 2\r\n\r\nno")
    assert (start["status"], start["headers"], body["body"]) == (401, [(b"www-authenticate", b"Bearer")], b"no")


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", b"", b"what is this\r\n\r\n"]
)
def test_a_process_serves_its_viewers_itself_while_the_first_does_not(answer: bytes) -> None:
    assert answer_of(answer) == [OWN]


def test_nobody_waits_for_a_first_process_that_is_silent_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.router.http.console.relay.PATIENCE_S", 0.01)

    async def run() -> None:
        async def silent(head: bytes, writer: asyncio.StreamWriter) -> None:
            pass

        viewer = Viewer()
        async with first_process(silent) as (address, is_left):
            await viewer.looks(FirstProcess(address))
            await is_left.wait()
        await viewer.looks(FirstProcess(address))  # nobody listens there any more
        assert viewer.told() == [OWN, OWN]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_only_streams_are_handed_on() -> None:
    viewer = Viewer("HEAD")
    asyncio.run(viewer.looks(FirstProcess(("127.0.0.1", 1))))
    assert viewer.told() == [OWN]


def test_a_process_that_leaves_ends_the_streams_that_it_hands_on_and_takes_no_more() -> None:
    async def run() -> None:
        async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(SSE + chunk(b"event: ping\n\n"))

        viewer, late = Viewer(), Viewer()
        async with first_process(serve) as (address, is_left):
            first = FirstProcess(address)
            looking = asyncio.ensure_future(viewer.looks(first))
            assert [(await viewer.sent.get())["type"] for _ in range(2)][1] == "http.response.body"
            first.close()
            await looking
            await is_left.wait()
            assert viewer.told()[-1]["more_body"] is False
            await late.looks(first)
            assert late.told() == [OWN]

    asyncio.run(asyncio.wait_for(run(), 60))
