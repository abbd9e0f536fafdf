"""Routers that ask each other, over real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from diptych.common.trust.tokens import Tokens
from diptych.common.trust.trust import INSECURE, Trust
from diptych.router.choose.explain import Explanations
from diptych.router.console.calls.calls import Calls
from diptych.router.console.calls.request_rows import RowFilter
from diptych.router.console.other_routers import OtherRouters, requests_of_all, story_of_any
from diptych.router.console.pieces import at_once
from diptych.router.tracing.record import CallTrace, EntryPoint
from diptych.router.tracing.tracer import Tracer
from diptych.v1.bootstrap_pb2 import Instance

Serve = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
EDGE = EntryPoint("POST /v1/completions", {}, "http.response.status_code", "/v1/completions")
HERE = 7
PATIENCE_S = 60.0  # where something answers


class Members:
    """The routers of a platform."""

    router_id = HERE

    def __init__(self, addresses: Mapping[int, str]) -> None:
        self._addresses = {HERE: "127.0.0.1:1", **addresses}

    def routers(self) -> dict[int, Instance]:
        return {key: Instance(instance_id=key, address=address) for key, address in self._addresses.items()}


@asynccontextmanager
async def router(serve: Serve) -> AsyncIterator[str]:
    """Yield the address of one that answers each head of a request with what `serve` writes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve((await reader.readuntil(b"\r\n\r\n")).decode(), writer)
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def saying(answer: Any, status: str = "200 OK") -> Serve:
    async def serve(head: str, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    return serve


def writing(raw: bytes) -> Serve:
    async def serve(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    return serve


def ask(serve: Serve, trust: Trust = INSECURE, deadline_s: float = PATIENCE_S) -> tuple[Mapping[int, Any], Any]:
    """Return what one other router says, and who does not answer."""

    async def asked() -> tuple[Mapping[int, Any], Any]:
        async with router(serve) as address:
            others = OtherRouters(Members({1: address}), trust, deadline_s=deadline_s)
            return await others.ask("/some?path=1"), others.missing

    return asyncio.run(asked())


def test_who_is_asked_gets_the_path_with_our_token() -> None:
    heads = []

    async def serve(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        await saying({"a": 1})(head, writer)

    trust = Trust(Tokens.of_variable("router:secret-of-a-router"), None)
    assert ask(serve, trust) == ({1: {"a": 1}}, {})
    (head,) = heads
    assert head.startswith("GET /some?path=1 HTTP/1.1\r\nhost: 127.0.0.1:")
    ((_, authorization),) = trust.metadata()
    assert f"\r\nauthorization: {authorization}\r\n" in head


def test_an_answer_may_come_in_chunks() -> None:
    raw = b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\n{"a"\r\n4\r\n: 1}\r\n0\r\n\r\n'
    assert ask(writing(raw)) == ({1: {"a": 1}}, {})


@pytest.mark.parametrize("status", ["404 Not Found", "401 Unauthorized", "500 Internal Server Error"])
def test_who_has_nothing_is_not_missing(status: str) -> None:
    assert ask(saying({"error": "..."}, status)) == ({}, {})


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{",
    ],
    ids=["nothing", "cut off", "no HTTP", "no JSON"],
)
def test_who_answers_ill_is_left_out_and_named(raw: bytes) -> None:
    answers, missing = ask(writing(raw))
    assert (answers, list(missing)) == ({}, [1])
    assert missing[1]


def test_who_is_not_there_is_left_out_and_named() -> None:
    async def asked() -> tuple[Any, Any]:
        async with router(saying({})) as address:
            pass
        others = OtherRouters(Members({1: address}), INSECURE)
        return await others.ask("/"), others.missing

    answers, missing = asyncio.run(asked())
    assert (answers, list(missing)) == ({}, [1])


def test_some_may_be_asked_and_who_is_not_asked_stays_missing() -> None:
    async def asked() -> tuple[Any, Any, Any, Any]:
        async with router(saying({"a": 1})) as address, router(writing(b"")) as ill:
            others = OtherRouters(Members({1: address, 2: ill}), INSECURE, deadline_s=PATIENCE_S)
            await others.ask("/")
            return others.ids(), await others.ask_each({1: "/"}), others.missing, await others.ask_each({})

    ids, answers, missing, nothing = asyncio.run(asked())
    assert (ids, answers, list(missing), nothing) == ({1, 2}, {1: {"a": 1}}, [2], {})


def test_one_that_never_answers_holds_up_nobody_for_longer_than_the_deadline() -> None:
    async def asked() -> tuple[Any, Any, bool]:
        forever = asyncio.Event()

        async def hang(head: str, writer: asyncio.StreamWriter) -> None:
            await forever.wait()

        async with router(hang) as silent, router(saying({"a": 1})) as other:
            others = OtherRouters(Members({1: silent, 2: other}), INSECURE, deadline_s=0.5)
            answers = await others.ask("/")
            was_silent = not forever.is_set()
            forever.set()
            return answers, others.missing, was_silent

    assert asyncio.run(asked()) == ({2: {"a": 1}}, {1: "nothing came for 0.5 s"}, True)


def calls_of(router_id: int, *ended: str) -> Calls:
    calls = Calls(Tracer(), Explanations(10), router_id, time.monotonic, time.time)
    for number, request_id in enumerate(ended):
        call = CallTrace(EDGE, 0.0, number * 10**9, {}, time.monotonic, outcome="ok", ended_s=1.0)
        call.note_origin(request_id, f"tenant {router_id}")
        calls.add(call)
    return calls


def answering(calls: Calls) -> Serve:
    """As the routes of the console answer, for this router alone."""

    async def serve(head: str, writer: asyncio.StreamWriter) -> None:
        path, _, query = head.split(" ")[1].partition("?")
        assert "scope=here" in query
        if path == "/console/api/requests":
            fields = dict(pair.split("=", 1) for pair in query.split("&"))
            await saying(at_once(calls.requests(RowFilter.of_query(fields))))(head, writer)
        else:
            story = at_once(calls.story(path.removeprefix("/console/api/requests/").replace("%2F", "/")))
            await (saying({}, "404 Not Found") if story is None else saying(story))(head, writer)

    return serve


def test_two_routers_answer_for_each_other() -> None:
    async def test() -> None:
        here, there = calls_of(HERE, "a", "b"), calls_of(1, "c", "d/e")
        async with router(answering(there)) as address:
            others = OtherRouters(Members({1: address}), INSECURE, deadline_s=PATIENCE_S)
            rows = (await requests_of_all(here, others, RowFilter()))["rows"]
            assert {key: row["router"][-1] for key, row in rows.items()} == {"a": "7", "b": "7", "c": "1", "d/e": "1"}
            only = (await requests_of_all(here, others, RowFilter(limit=1)))["rows"]
            assert len(only) == 1
            for request_id in ("a", "d/e"):
                story = await story_of_any(here, others, request_id)
                assert story is not None
                assert story["row"] == rows[request_id]
            assert await story_of_any(here, others, "nobody's") is None

    asyncio.run(test())


def test_a_router_of_another_version_costs_nobody_the_list() -> None:
    async def test() -> None:
        async with router(saying({"rows": {"x": {"id": "x"}}})) as address:
            others = OtherRouters(Members({1: address}), INSECURE, deadline_s=PATIENCE_S)
            assert (await requests_of_all(calls_of(HERE, "a"), others, RowFilter()))["rows"].keys() == {"a"}
            assert await story_of_any(calls_of(HERE, "a"), others, "x") is None

    asyncio.run(test())
