"""Connects a process to the membership: `Registration` tells every bootstrap replica about it, and
`MembershipWatcher` follows what the replicas report about the others.

Both talk to each replica on a stream of its own and reconnect for ever: bootstrap may be away at any time, and no
worker or router stops for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import grpc

from diptych.common.errors import Unavailable
from diptych.common.event_loop import raise_if_cancelled, wait_or_timeout
from diptych.common.members.membership import Lost, MembershipView, Snapshot, Update
from diptych.common.members.replicas import Replicas
from diptych.common.members.watch_stream import Gap, WatchStream
from diptych.common.net.rpc import open_channel
from diptych.common.trust.instance_secret import InstanceSecret, shown
from diptych.common.trust.trust import Trust
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import HeartbeatReply, Instance, WatchRequest
from diptych.v1.bootstrap_pb2_grpc import BootstrapStub

logger = logging.getLogger(__name__)

_MAX_REASONS = 20  # why a replica is away
_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 1.0  # well below the lease, so that a restarted replica hears of everybody in time
_REPLY_TIMEOUT_S = 5.0
_GOODBYE_TIMEOUT_S = 1.0
_MIN_INTERVAL_S = 0.02  # between heartbeats, however often we are nudged: bootstrap refuses a flood


class Evicted(Unavailable):
    """A newer instance registered at our address: this process must stop."""


class MembershipWatcher:
    """Everybody who is alive, kept current by `run`; see `diptych.common.members.membership` for what that means."""

    def __init__(
        self,
        addresses: Sequence[str],
        trust: Trust,
        *,
        instances: Sequence[InstanceSecret] = (),
        without_loads: bool = False,
        lease_s: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Follow the replicas at `addresses`, `without_loads` for those who only care for what else changes.

        `instances` are those of this process, which must register: who they may link to is told to them alone.
        """
        self._replicas = Replicas(addresses)
        self._numbers = itertools.count()  # number of each replica in the view
        self._trust = trust
        self._shown = shown(instances)
        self._view: MembershipView[Instance] = MembershipView(lease_s=lease_s)
        self._without_loads = without_loads
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._deadline_moved = asyncio.Event()

    def instances(self) -> Mapping[int, Instance]:
        """Return a live, read-only view: instance id to record. Copy it to keep it across an await."""
        return self._view.instances

    def retained(self) -> Mapping[int, Instance]:
        """Return those that no connected replica lists: they are kept, as bootstrap is away or has just restarted."""
        return self._view.retained

    def has_ended(self, instance_id: int) -> bool:
        """Whether one that is no longer listed said goodbye or was evicted: else its lease expired."""
        return self._view.has_ended(instance_id)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change. It must not block."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Follow every replica until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_forever())
            tasks.create_task(self._replicas.run(self._follow))

    async def _follow(self, address: str) -> None:
        replica = next(self._numbers)
        link = _Link(address, self._trust, "watching", on_lost=lambda: self._apply(Lost(replica)))
        try:
            await link.run(lambda stub: self._receive_updates(replica, stub, link))
        finally:
            self._apply(Lost(replica))  # it is no replica any more

    async def _receive_updates(self, replica: int, stub: BootstrapStub, link: _Link) -> None:
        stream, request = WatchStream(replica), WatchRequest(without_loads=self._without_loads)
        async with asyncio.timeout(None) as patience:
            async for update in stub.Watch(request, metadata=self._shown):
                link.established()
                try:
                    self._apply(stream.receive(update))
                except Gap:
                    return
                if stream.patience_s is not None:
                    patience.reschedule(asyncio.get_running_loop().time() + stream.patience_s)

    def _apply(self, event: Snapshot[Instance] | Update[Instance] | Lost) -> None:
        changed = self._view.apply(event, self._clock())
        self._deadline_moved.set()
        if changed:
            self._notify_listeners()

    async def _expire_forever(self) -> None:
        while True:
            deadline_s = self._view.next_deadline_s
            self._deadline_moved.clear()
            if deadline_s is None:
                await self._deadline_moved.wait()
            else:
                await wait_or_timeout(self._deadline_moved, deadline_s - self._clock())
                if self._view.expire(self._clock()):
                    self._notify_listeners()

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()


class Registration:
    """Keeps this process registered with every replica. `describe` returns its whole record, as it is now."""

    def __init__(
        self,
        addresses: Sequence[str],
        trust: Trust,
        describe: Callable[[], Instance],
        secret: InstanceSecret | None = None,
    ) -> None:
        """`secret` is that of the instance: without one only who is every party may speak for it."""
        self._replicas = Replicas(addresses)
        self._trust = trust
        self._describe = describe
        self._shown = shown([secret] if secret else ())
        self._nudges: dict[str, asyncio.Event] = {}  # by replica
        self._sequence = 0
        self.started_unix_ns = time.time_ns()

    def nudge(self) -> None:
        """Send a heartbeat at once: the record changed in a way that others wait for."""
        for event in self._nudges.values():
            event.set()

    async def run(self) -> None:
        """Heartbeat until cancelled, then say goodbye. Raises `Evicted` when a newer instance has our address."""
        try:
            await self._replicas.run(self._register)
        except asyncio.CancelledError:
            await asyncio.gather(*map(self._deregister, self._replicas.known))
            raise

    async def _register(self, address: str) -> None:
        link = _Link(address, self._trust, "registering with", on_lost=lambda: None)
        nudge = self._nudges[address] = asyncio.Event()
        try:
            await link.run(lambda stub: self._heartbeat_forever(stub, link, nudge))
        finally:
            del self._nudges[address]

    async def _heartbeat_forever(self, stub: BootstrapStub, link: _Link, nudge: asyncio.Event) -> None:
        call = stub.Register(metadata=self._shown)
        while True:
            nudge.clear()
            async with asyncio.timeout(_REPLY_TIMEOUT_S):
                reply = await _exchange(call, self._heartbeat())
            if not isinstance(reply, HeartbeatReply):
                return  # grpc.aio.EOF
            if reply.evicted:
                raise Evicted(f"a newer instance registered at our address {self._describe().address}")
            link.established()
            await asyncio.sleep(_MIN_INTERVAL_S)
            await wait_or_timeout(nudge, reply.interval_ms / 1000 - _MIN_INTERVAL_S)

    def _heartbeat(self) -> bootstrap_pb2.Heartbeat:
        self._sequence += 1
        heartbeat = bootstrap_pb2.Heartbeat(sequence=self._sequence, instance=self._describe())
        heartbeat.instance.started_unix_ns = self.started_unix_ns
        return heartbeat

    async def _deregister(self, address: str) -> None:
        """Best effort, on a stream of its own: cancelling a read or a write has cancelled the other one."""
        heartbeat = self._heartbeat()
        heartbeat.instance.state = bootstrap_pb2.INSTANCE_STATE_GONE
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S), open_channel(address, self._trust) as channel:
                call = BootstrapStub(channel).Register(metadata=self._shown)
                await call.write(heartbeat)
                await call.read()
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
            logger.debug("no goodbye to bootstrap at %s: it is away", address)


async def _exchange(
    call: grpc.aio.StreamStreamCall[bootstrap_pb2.Heartbeat, HeartbeatReply], heartbeat: bootstrap_pb2.Heartbeat
) -> HeartbeatReply | object:
    """Return the reply, or `grpc.aio.EOF`. Raises `AioRpcError` with the reason if the replica ends the stream."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it ended under the write
        await call.write(heartbeat)
    return await call.read()


class _Link:
    """One replica: runs a session with it again and again, and says in the log when it comes and goes.

    Every reason why it is away is said once: the first one need not be what keeps it away.
    """

    def __init__(self, address: str, trust: Trust, purpose: str, on_lost: Callable[[], None]) -> None:
        self._address = address
        self._trust = trust
        self._purpose = purpose
        self._on_lost = on_lost
        self._delay_s = _FIRST_RETRY_S
        self._is_up = False
        self._told: set[str] = set()  # why it is away

    async def run(self, session: Callable[[BootstrapStub], Awaitable[None]]) -> None:
        """Run `session` for ever. It calls `established` when the replica has answered."""
        while True:
            async with open_channel(self._address, self._trust) as channel:
                await self._try(session(BootstrapStub(channel)))
            raise_if_cancelled()
            await asyncio.sleep(self._delay_s * random.uniform(0.5, 1.0))
            self._delay_s = min(self._delay_s * 2, _MAX_RETRY_S)

    async def _try(self, session: Awaitable[None]) -> None:
        """Run one session on a channel of its own, which uses the certificates of now."""
        try:
            await session
            self._note_lost("the stream ended")
        except grpc.aio.AioRpcError as error:
            self._note_lost(error.details() or error.code().name)
        except TimeoutError:
            self._note_lost("no answer")

    def established(self) -> None:
        if not self._is_up:
            logger.info("%s bootstrap at %s", self._purpose, self._address)
        self._is_up = True
        self._told.clear()
        self._delay_s = _FIRST_RETRY_S

    def _note_lost(self, reason: str) -> None:
        self._on_lost()
        self._is_up = False
        if reason not in self._told and len(self._told) < _MAX_REASONS:
            self._told.add(reason)
            logger.warning("%s bootstrap at %s: away (%s); trying again", self._purpose, self._address, reason)
