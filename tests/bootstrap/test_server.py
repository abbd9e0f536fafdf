from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
import pytest

from diptych.bootstrap.caller import BURST, MAX_MESSAGE_BYTES
from diptych.bootstrap.server import SERVICE, BootstrapService, Clock
from diptych.common.errors import ConfigError
from diptych.common.members.membership_client import Evicted, MembershipWatcher, Registration
from diptych.common.net.ports import free_port
from diptych.common.net.rpc import listen, new_server, open_channel
from diptych.common.refusals import Refusals
from diptych.common.trust.trust import INSECURE
from diptych.v1 import bootstrap_pb2, bootstrap_pb2_grpc
from diptych.v1.bootstrap_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_READY,
    INSTANCE_STATE_STARTING,
    ROLE_PREFILL,
    Heartbeat,
    Instance,
)

TIMEOUT_S = 200.0
LEASE_S = 1.0  # where a lease ends
LONGER_S = 2.0  # where it must not end before something happens
LONG_S = 600.0  # where none does, however busy the machine
HEARTBEAT_S = 0.1


def instance(instance_id: int, *, at: str = "", state: Any = INSTANCE_STATE_READY) -> Instance:
    address = at or f"host-{instance_id}:1"
    return Instance(instance_id=instance_id, role=ROLE_PREFILL, address=address, state=state)


@contextlib.asynccontextmanager
async def bootstrap(port: int = 0, *, lease_s: float = LONG_S, clock: Clock = time.monotonic) -> AsyncIterator[int]:
    """A bootstrap server; yields its port."""
    service = BootstrapService(INSECURE, lease_s=lease_s, heartbeat_s=HEARTBEAT_S, clock=clock)
    server = new_server(INSECURE, Refusals(), [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    service.add_to(server)
    port = listen(server, "127.0.0.1", port, INSECURE)
    await server.start()
    async with running(service.run()):
        yield port
    await server.stop(grace=None)


@contextlib.asynccontextmanager
async def running(*runs: Any) -> AsyncIterator[None]:
    """Background tasks, cancelled and awaited at the end."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class Observer:
    """A watcher that remembers every set of instances that it saw."""

    def __init__(self, *ports: int, lease_s: float = LONG_S) -> None:
        self.watcher = MembershipWatcher([f"127.0.0.1:{port}" for port in ports], INSECURE, lease_s=lease_s)
        self.watcher.add_listener(self._on_change)
        self.history: list[dict[int, int]] = []
        self._num_looked_at = 0  # of the history, by `sees`
        self._changed = asyncio.Event()

    def _on_change(self) -> None:
        self.history.append({each.instance_id: each.state for each in self.watcher.instances().values()})
        self._changed.set()

    async def sees(self, expected: Mapping[int, int]) -> None:
        """Wait until this is what there is, or was for a moment since it saw what it was last asked for."""
        async with asyncio.timeout(TIMEOUT_S):
            while expected not in self.history[self._num_looked_at :] and self.history[-1:] != [expected]:
                self._changed.clear()
                await self._changed.wait()
        if expected in self.history[self._num_looked_at :]:
            self._num_looked_at = 1 + self.history.index(dict(expected), self._num_looked_at)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


def registration(ports: Sequence[int], record: Instance) -> Registration:
    return Registration([f"127.0.0.1:{port}" for port in ports], INSECURE, lambda: record)


def test_a_watcher_sees_an_instance_register_become_ready_and_leave() -> None:
    async def test() -> None:
        async with bootstrap() as port:
            observer, record = Observer(port), instance(1, state=INSTANCE_STATE_STARTING)
            worker = registration([port], record)
            async with running(observer.watcher.run()):
                async with running(worker.run()):
                    await observer.sees({1: INSTANCE_STATE_STARTING})
                    record.state = INSTANCE_STATE_READY
                    worker.nudge()
                    await observer.sees({1: INSTANCE_STATE_READY})
                await observer.sees({})  # long before the lease ends: it said goodbye

    run(test)


def test_a_watcher_that_comes_later_gets_everybody_at_once() -> None:
    async def test() -> None:
        async with bootstrap() as port:
            early, late = Observer(port), Observer(port)
            workers = [registration([port], instance(number)).run() for number in (1, 2, 3)]
            everybody = dict.fromkeys((1, 2, 3), INSTANCE_STATE_READY)
            async with running(early.watcher.run(), *workers):
                await early.sees(everybody)
                async with running(late.watcher.run()):
                    await late.sees(everybody)
                assert late.history == [everybody]

    run(test)


def test_silence_ends_the_lease_and_a_closed_stream_does_not() -> None:
    async def test() -> None:
        async with bootstrap(lease_s=LEASE_S) as port:
            observer, loop = Observer(port, lease_s=LEASE_S), asyncio.get_running_loop()
            async with running(observer.watcher.run()), channel(port) as stub:
                started_s = loop.time()
                await heartbeat_once(stub, Heartbeat(sequence=1, instance=instance(1)))
                await observer.sees({1: INSTANCE_STATE_READY})
                await observer.sees({})
                assert loop.time() - started_s >= LEASE_S

    run(test)


def test_a_replica_that_was_paused_takes_nobody_for_dead() -> None:
    """It wakes before it has read the heartbeats that came meanwhile."""

    async def test() -> None:
        paused_s, loop = 0.0, asyncio.get_running_loop()
        async with bootstrap(lease_s=LONGER_S, clock=lambda: time.monotonic() + paused_s) as port:
            observer = Observer(port, lease_s=LONGER_S)
            async with running(observer.watcher.run()), channel(port) as stub:
                await heartbeat_once(stub, Heartbeat(sequence=1, instance=instance(1)))
                await observer.sees({1: INSTANCE_STATE_READY})
                paused_s, woken_s = 60.0, loop.time()  # before the lease ends, on however busy a machine
                await observer.sees({})
                assert loop.time() - woken_s >= LONGER_S

    run(test)


@contextlib.asynccontextmanager
async def channel(port: int) -> AsyncIterator[bootstrap_pb2_grpc.BootstrapStub]:
    async with open_channel(f"127.0.0.1:{port}", INSECURE) as opened:
        yield bootstrap_pb2_grpc.BootstrapStub(opened)


async def heartbeat_once(stub: bootstrap_pb2_grpc.BootstrapStub, *heartbeats: Heartbeat) -> Any:
    """Send on a stream of its own; return the last reply."""
    call = stub.Register(iter(heartbeats))
    return [reply async for reply in call][-1]


@pytest.mark.parametrize(
    ("heartbeats", "message"),
    [
        (
            [Heartbeat(sequence=1, instance=Instance(address="a:1", role=ROLE_PREFILL, state=INSTANCE_STATE_READY))],
            "needs instance_id",
        ),
        (
            [Heartbeat(sequence=1, instance=Instance(instance_id=1, role=ROLE_PREFILL, state=INSTANCE_STATE_READY))],
            "needs instance_id",
        ),
        (
            [Heartbeat(sequence=1, instance=Instance(instance_id=1, role=ROLE_PREFILL, address="a:1"))],
            "state 0 is unknown",
        ),
        (
            [
                Heartbeat(sequence=1, instance=instance(1, state=INSTANCE_STATE_DRAINING)),
                Heartbeat(sequence=2, instance=instance(1, state=INSTANCE_STATE_READY)),
            ],
            "is draining: 'says ready' is not possible",
        ),
    ],
)
def test_a_heartbeat_that_makes_no_sense_is_refused_with_a_reason(heartbeats: list[Heartbeat], message: str) -> None:
    async def test() -> None:
        async with bootstrap() as port, channel(port) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await heartbeat_once(stub, *heartbeats)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert message in str(caught.value.details())

    run(test)


FIRST_BEAT = Heartbeat(instance=instance(2)).SerializeToString()
REGISTER = "/diptych.v1.Bootstrap/Register"


@pytest.mark.parametrize(
    ("message", "count", "code", "words"),
    [
        (b"\xff", 1, grpc.StatusCode.INVALID_ARGUMENT, "no diptych.v1.Heartbeat"),
        (bytes(MAX_MESSAGE_BYTES + 1), 1, grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
        (FIRST_BEAT, BURST + 1, grpc.StatusCode.RESOURCE_EXHAUSTED, "more than 50 heartbeats a second"),
    ],
)
def test_what_is_too_much_or_no_message_ends_its_stream_and_no_other(
    message: bytes, count: int, code: grpc.StatusCode, words: str
) -> None:
    async def test() -> None:
        async with bootstrap(clock=lambda: 0.0) as port, open_channel(f"127.0.0.1:{port}", INSECURE) as opened:
            observer = Observer(port)
            async with running(observer.watcher.run(), registration([port], instance(1)).run()):
                await observer.sees({1: INSTANCE_STATE_READY})
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in opened.stream_stream(REGISTER, bytes, bytes)(iter([message] * count)):
                        pass
                assert (caught.value.code(), words in str(caught.value.details())) == (code, True)
                assert all(1 in seen for seen in observer.history)

    run(test)


def test_a_replica_that_falls_silent_counts_as_away() -> None:
    """Its machine is dead, or it is paused: no connection ends for that."""

    async def test() -> None:
        snapshot = bootstrap_pb2.WatchUpdate(
            revision=1, snapshot=True, upserts=[instance(1)], lease_ms=round(LEASE_S * 1000), max_silence_ms=1
        )

        async def fall_silent(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield snapshot.SerializeToString()
            await asyncio.Event().wait()

        server = new_server(INSECURE, Refusals())
        handlers = {"Watch": grpc.unary_stream_rpc_method_handler(fall_silent)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        silent = listen(server, "127.0.0.1", 0, INSECURE)
        await server.start()
        async with bootstrap(lease_s=LEASE_S) as port:
            observer = Observer(silent, port, lease_s=LEASE_S)
            async with running(observer.watcher.run()):
                await observer.sees({1: INSTANCE_STATE_READY})
                snapshot.ClearField("upserts")
                await observer.sees({})
        await server.stop(grace=None)

    run(test)


def test_a_watcher_hears_of_its_replica_although_nothing_happens() -> None:
    async def test() -> None:
        async with bootstrap(lease_s=LEASE_S) as port, channel(port) as stub:
            updates = stub.Watch(bootstrap_pb2.WatchRequest())
            async with asyncio.timeout(TIMEOUT_S):
                heard = [await updates.read() for _ in range(3)]
            updates.cancel()
            assert heard == [
                bootstrap_pb2.WatchUpdate(revision=1, snapshot=True, lease_ms=1000, max_silence_ms=333),
                bootstrap_pb2.WatchUpdate(revision=2),
                bootstrap_pb2.WatchUpdate(revision=3),
            ]

    run(test)


def test_the_server_names_interval_and_lease() -> None:
    async def test() -> None:
        async with bootstrap(lease_s=LEASE_S) as port, channel(port) as stub:
            reply = await heartbeat_once(stub, Heartbeat(sequence=1, instance=instance(1)))
            assert reply == bootstrap_pb2.HeartbeatReply(interval_ms=100, lease_ms=1000)

    run(test)


def test_an_instance_whose_address_was_taken_stops_itself() -> None:
    async def test() -> None:
        async with bootstrap() as port:
            observer = Observer(port)
            old = asyncio.ensure_future(registration([port], instance(1, at="host:1")).run())
            async with running(observer.watcher.run()):
                await observer.sees({1: INSTANCE_STATE_READY})
                async with running(registration([port], instance(2, at="host:1")).run()):
                    with pytest.raises(Evicted, match="host:1"):
                        await asyncio.wait_for(old, TIMEOUT_S)
                    await observer.sees({2: INSTANCE_STATE_READY})

    run(test)


def test_nobody_is_missed_when_bootstrap_restarts() -> None:
    async def test() -> None:
        async with bootstrap(free_port()) as port:
            observer = Observer(port)
            worker = running(registration([port], instance(1)).run(), observer.watcher.run())
            await worker.__aenter__()
            await observer.sees({1: INSTANCE_STATE_READY})
        async with bootstrap(port) as port:
            async with running(registration([port], instance(2)).run()):
                await observer.sees({1: INSTANCE_STATE_READY, 2: INSTANCE_STATE_READY})
                await registered_again(port, 1)
            await observer.sees({1: INSTANCE_STATE_READY})
            await worker.__aexit__(None, None, None)
        assert all(1 in seen for seen in observer.history)

    run(test)


async def registered_again(port: int, instance_id: int) -> None:
    """Wait until the server itself, not a watcher's memory, lists the instance."""
    async with asyncio.timeout(TIMEOUT_S), channel(port) as stub:
        async for update in stub.Watch(bootstrap_pb2.WatchRequest()):
            if instance_id in {each.instance_id for each in update.upserts}:
                return


def test_one_of_two_replicas_is_enough() -> None:
    async def test() -> None:
        async with bootstrap() as second:
            async with bootstrap() as first:
                observer = Observer(first, second)
                workers = running(registration([first, second], instance(1)).run(), observer.watcher.run())
                await workers.__aenter__()
                await observer.sees({1: INSTANCE_STATE_READY})
            async with running(registration([first, second], instance(2)).run()):
                await observer.sees({1: INSTANCE_STATE_READY, 2: INSTANCE_STATE_READY})
            await observer.sees({1: INSTANCE_STATE_READY})
            await workers.__aexit__(None, None, None)

    run(test)


def test_a_port_in_use_is_an_error_that_says_so() -> None:
    async def test() -> None:
        async with bootstrap() as port:
            with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}: stop what uses this port"):
                async with bootstrap(port):
                    pass

    run(test)
