"""Calls of the gRPC API before their handlers: how many a key may have open, and how much of them is read at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import grpc
import pytest

from diptych.common.errors import InvalidRequest
from diptych.common.net.rpc import MAX_CALLS, guarded_server, listen, open_channel
from diptych.common.trust.trust import INSECURE
from diptych.router.admission.body_budget import BodyBudget
from diptych.router.grpc import server as server_module
from diptych.router.grpc.inference import INFERENCE
from diptych.router.grpc.server import (
    MAX_ARRIVING,
    MAX_CALLS_OF_A_KEY,
    MAX_STRANGE_BYTES,
    NUM_STRANGERS,
    QUICK_BYTES,
    SMALL_BYTES,
    CallGate,
    MessageReader,
)
from diptych.router.keys.caller import Callers
from diptych.router.keys.keyring import ApiKey, digest_of
from diptych.router.keys.ledger import Ledger
from diptych.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest

TIMEOUT_S = 400.0
METHOD = "/test.Service/Method"
GENERATE = "/diptych.v1.Inference/Generate"
ALICE, BOB = (("authorization", "Bearer alice's"),), (("authorization", "Bearer bob's"),)
KEYRING = {digest_of(f"{name}'s"): ApiKey(name) for name in ("alice", "bob")}


class Call(NamedTuple):
    """What an interceptor is told of a call."""

    method: str
    invocation_metadata: Any


async def silent() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


async def echo(request: bytes, _: Any) -> bytes:
    return request


async def continuation(_: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(echo, request_deserializer=bytes)


def new_gate(stall_s: float = TIMEOUT_S) -> CallGate:
    callers = Callers(lambda: KEYRING, lambda: 0.0, Ledger())
    return CallGate(callers, BodyBudget(2**20), MessageReader(INFERENCE), stall_s=stall_s)


@contextlib.asynccontextmanager
async def serving(gate: CallGate) -> AsyncIterator[str]:
    server = guarded_server(gate)
    handler = grpc.unary_unary_rpc_method_handler(echo, request_deserializer=bytes)
    service, _, method = METHOD[1:].partition("/")
    health = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler})
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}), health))
    port = listen(server, "127.0.0.1", 0, INSECURE)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


async def status_of(call: Any) -> grpc.StatusCode:
    try:
        await call.read() if hasattr(call, "read") else await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_calls_of_one_key_that_send_nothing_leave_the_places_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_CALLS_OF_A_KEY + NUM_STRANGERS < MAX_CALLS, "gRPC has places for others"
    monkeypatch.setattr(server_module, "MAX_CALLS_OF_A_KEY", 9)  # thousands outlast the keepalive of a busy machine

    async def test() -> None:
        async with serving(new_gate()) as address, open_channel(address, INSECURE) as channel:
            opening = channel.stream_stream(METHOD, bytes, bytes)
            statuses = [asyncio.ensure_future(status_of(opening(silent(), metadata=ALICE))) for _ in range(9 + 3)]
            while sum(status.done() for status in statuses) < 3:
                await asyncio.wait([each for each in statuses if not each.done()], return_when="FIRST_COMPLETED")
            assert [each.result() for each in statuses if each.done()] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
            assert await channel.unary_unary(METHOD, bytes, bytes)(b"b", metadata=BOB) == b"b"
            for status in statuses:
                status.cancel()

    run(test)


def test_a_call_whose_message_does_not_come_ends() -> None:
    async def test() -> None:
        async with serving(new_gate(stall_s=0.05)) as address, open_channel(address, INSECURE) as channel:
            call = channel.stream_stream(METHOD, bytes, bytes)(silent(), metadata=ALICE)
            assert await status_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED

    run(test)


@pytest.mark.parametrize("method", [METHOD, "/grpc.health.v1.Health/Check"])
def test_without_a_key_calls_have_few_places_whatever_they_send(method: str) -> None:
    async def test() -> None:
        async with serving(new_gate()) as address, open_channel(address, INSECURE) as channel:
            calls = [channel.stream_stream(method, bytes, bytes)(silent()) for _ in range(NUM_STRANGERS + 9)]
            statuses = [asyncio.ensure_future(status_of(call)) for call in calls]
            ended = 9 if method != METHOD else len(calls)
            while sum(status.done() for status in statuses) < ended:
                await asyncio.wait([each for each in statuses if not each.done()], return_when="FIRST_COMPLETED")
            expected = grpc.StatusCode.UNAUTHENTICATED if method == METHOD else grpc.StatusCode.RESOURCE_EXHAUSTED
            assert {status.result() for status in statuses if status.done()} == {expected}
            for status in statuses:
                status.cancel()

    run(test)


def test_few_messages_of_a_key_are_read_at_once_and_those_of_others_beside_them() -> None:
    reading: list[str] = []

    async def arriving(name: str) -> AsyncIterator[bytes]:
        reading.append(name)
        await asyncio.Event().wait()
        yield b""

    async def test() -> None:
        gate = new_gate()
        calls: list[asyncio.Future[None]] = []
        for name, metadata, count in (("alice", ALICE, MAX_ARRIVING + 5), ("bob", BOB, 3)):
            handler: Any = await gate.intercept_service(continuation, Call(METHOD, metadata))  # type: ignore[arg-type]
            calls += [asyncio.ensure_future(handler.stream_stream(arriving(name), None)) for _ in range(count)]
        while len(reading) < MAX_ARRIVING + 3:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)
        for _ in range(100):  # rounds of the loop, in which nobody else may begin
            await asyncio.sleep(0)
        assert Counter(reading) == {"alice": MAX_ARRIVING, "bob": 3}
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)

    run(test)


def test_without_a_key_messages_are_short() -> None:
    async def test() -> None:
        async with serving(new_gate()) as address, open_channel(address, INSECURE) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
            assert await check(b"a" * MAX_STRANGE_BYTES) == b"a" * MAX_STRANGE_BYTES
            assert await status_of(check(b"a" * (MAX_STRANGE_BYTES + 1))) is grpc.StatusCode.INVALID_ARGUMENT

    run(test)


EMPTY_MESSAGES = b"\x0a\x00"


@pytest.mark.parametrize(
    ("message", "is_here"),
    [
        (GenerateRequest(text="a"), True),
        (GenerateRequest(text="a" * SMALL_BYTES), True),
        (GenerateRequest(chat=ChatMessages(messages=[ChatMessage()] * (SMALL_BYTES // 2))), False),
        (GenerateRequest(text="a" * QUICK_BYTES), False),
    ],
    ids=["small", "one long field", "many fields", "a long field"],
)
def test_messages_that_take_long_are_decoded_in_a_thread(message: GenerateRequest, is_here: bool) -> None:
    threads: list[threading.Thread] = []

    def decode(wire: bytes) -> GenerateRequest:
        threads.append(threading.current_thread())
        return GenerateRequest.FromString(wire)

    async def test() -> None:
        read = await MessageReader(INFERENCE).read(GENERATE, decode, message.SerializeToString())
        assert read == message
        assert (threads == [threading.current_thread()]) == is_here

    run(test)


def test_a_message_that_holds_too_much_is_never_decoded() -> None:
    def decode(_: bytes) -> None:
        raise AssertionError

    async def test() -> None:
        num_bytes = 3 << 20
        length = bytes(
            [num_bytes & 127 | 128, num_bytes >> 7 & 127 | 128, num_bytes >> 14 & 127 | 128, num_bytes >> 21]
        )
        with pytest.raises(InvalidRequest, match="the message holds too much"):
            await MessageReader(INFERENCE).read(GENERATE, decode, b"\x22" + length + EMPTY_MESSAGES * (num_bytes // 2))

    run(test)
