"""Who may call what, and who may not, with a token: real servers, real services."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from guarded_server import (
    INSTANCE,
    METHODS,
    OURS,
    THEIRS,
    TIMEOUT_S,
    call_of,
    cancel,
    code_of,
    count,
    first,
    run,
    serving,
    silent,
    watch,
)

from diptych.common.membership_client import MembershipWatcher, Registration
from diptych.common.refusals import Refusals
from diptych.common.rpc import MAX_MESSAGE_BYTES, open_channel, open_sync_channel
from diptych.common.trust import INSECURE, Trust
from diptych.v1 import bootstrap_pb2, bootstrap_pb2_grpc, worker_pb2, worker_pb2_grpc


@pytest.mark.parametrize(
    ("stranger", "reason", "words"),
    [
        (INSECURE, "no_token", "no token: give --auth-token-file or set DIPTYCH_AUTH_TOKEN"),
        (THEIRS, "wrong_token", "wrong token: compare --auth-token-file or DIPTYCH_AUTH_TOKEN"),
    ],
    ids=["no token", "wrong token"],
)
def test_who_does_not_know_the_token_can_do_nothing(stranger: Trust, reason: str, words: str) -> None:
    assert {"/diptych.v1.Bootstrap/Register", "/diptych.v1.Worker/Session", "/diptych.v1.WorkerAdmin/Drain"} < METHODS

    async def test() -> None:
        refusals = Refusals()
        async with serving(OURS, refusals) as address:
            for number, method in enumerate([*METHODS, "/diptych.v1.Worker/NotThere"], start=1):
                code, details = await code_of(call_of(method), address, stranger)
                assert (code, details.startswith(words)) == (grpc.StatusCode.UNAUTHENTICATED, True), method
                assert count(refusals, reason) == number
            assert (await code_of(status, address, stranger))[0] is grpc.StatusCode.UNAUTHENTICATED

    run(test)


def test_who_knows_the_token_is_served_on_channels_of_both_kinds() -> None:
    async def test() -> None:
        async with serving(OURS) as address:
            assert await code_of(watch, address, OURS) == (grpc.StatusCode.OK, "")
            snapshot = await asyncio.to_thread(watch_from_a_thread, address, OURS)
            assert (snapshot.revision, snapshot.snapshot) == (1, True)

    run(test)


def status(channel: grpc.aio.Channel) -> Awaitable[Any]:
    """A call of one message and one answer."""
    call: Awaitable[Any] = worker_pb2_grpc.WorkerStub(channel).GetStatus(worker_pb2.StatusRequest())
    return call


def watch_from_a_thread(address: str, trust: Trust) -> Any:
    with open_sync_channel(address, trust) as channel:
        updates = bootstrap_pb2_grpc.BootstrapStub(channel).Watch(bootstrap_pb2.WatchRequest(), timeout=TIMEOUT_S)
        update = next(updates)
        updates.cancel()
        return update


def test_health_is_told_to_everybody_who_asks_and_does_not_stay() -> None:
    async def test() -> None:
        async with serving(OURS) as address, open_channel(address, INSECURE) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            with pytest.raises(grpc.aio.AioRpcError, match="no token"):
                await first(watching)

    run(test)


def test_a_message_that_is_too_long_ends_its_call_and_unknown_fields_end_none() -> None:
    async def test() -> None:
        async with serving(OURS) as address, open_channel(address, OURS) as channel:
            watch = channel.unary_stream("/diptych.v1.Bootstrap/Watch", bytes, bytes)
            assert await first(watch(b"\xfa\xff\x01\x04more")), "a field of a later version"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await first(watch(bytes(MAX_MESSAGE_BYTES + 1)))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(test)


def test_a_call_keeps_the_metadata_that_it_brings_itself() -> None:
    async def test() -> None:
        async with serving(OURS) as address, open_channel(address, OURS) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Session(silent(), metadata=(("diptych-instance", "00ff"),))
            with pytest.raises(grpc.aio.AioRpcError, match="no instance 00ff here"):
                await first(call)

    run(test)


def test_a_stranger_is_neither_listed_nor_told_who_is_there() -> None:
    async def test() -> None:
        async with serving(OURS) as address:
            watcher, heard = MembershipWatcher([address], OURS), asyncio.Event()
            watcher.add_listener(heard.set)
            stranger = replace_id(2)
            registrations = (
                Registration([address], THEIRS, lambda: stranger),
                Registration([address], OURS, lambda: INSTANCE),
            )
            blind = MembershipWatcher([address], INSECURE)
            tasks = [asyncio.ensure_future(each.run()) for each in (watcher, blind, *registrations)]
            await heard.wait()
            assert (watcher.instances(), blind.instances()) == ({1: watcher.instances()[1]}, {})
            await cancel(tasks)

    run(test)


def replace_id(instance_id: int) -> bootstrap_pb2.Instance:
    other = bootstrap_pb2.Instance()
    other.CopyFrom(INSTANCE)
    other.instance_id, other.address = instance_id, f"a:{instance_id}"
    return other
