"""How a process takes part in the membership: `Registration` tells every bootstrap replica about it, and
`MembershipWatcher` follows what the replicas say about everybody else.

Both talk to each replica on a stream of its own and reconnect for ever: bootstrap may be away at any time, and no
worker or router stops for that.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import grpc

from diptych.common.errors import Unavailable
from diptych.common.lifecycle import wait_or_timeout
from diptych.common.membership import Lost, MembershipView, Record, Snapshot, State, Update
from diptych.common.rpc import CHANNEL_OPTIONS
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import HeartbeatReply, Instance
from diptych.v1.bootstrap_pb2_grpc import BootstrapStub

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 1.0  # well below the lease, so that a restarted replica hears of everybody in time
_REPLY_TIMEOUT_S = 5.0
_GOODBYE_TIMEOUT_S = 1.0


class Evicted(Unavailable):
    """A newer instance registered at our address: this process must stop."""


class MembershipWatcher:
    """Everybody who is alive, kept current by `run`; see `diptych.common.membership` for what that means."""

    def __init__(
        self, addresses: Sequence[str], *, lease_s: float = 3.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._addresses = tuple(addresses)
        self._view: MembershipView[Instance] = MembershipView(lease_s=lease_s)
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._deadline_moved = asyncio.Event()

    def instances(self) -> Mapping[int, Instance]:
        """Return a live, read-only view: instance id to record. Copy it to keep it across an await."""
        return self._view.instances

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change. It must not block."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Follow every replica until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_forever())
            for replica, address in enumerate(self._addresses):
                tasks.create_task(self._follow(replica, address))

    async def _follow(self, replica: int, address: str) -> None:
        link = _Link(address, "watching", on_lost=lambda: self._apply(Lost(replica)))
        await link.run(lambda stub: self._take_updates(replica, stub, link))

    async def _take_updates(self, replica: int, stub: BootstrapStub, link: _Link) -> None:
        revision = 0
        async for update in stub.Watch(bootstrap_pb2.WatchRequest()):
            link.established()
            if not update.snapshot and update.revision != revision + 1:
                return  # something was lost: the next stream starts with a snapshot
            revision = update.revision
            self._apply(_to_event(replica, update))

    def _apply(self, event: Snapshot[Instance] | Update[Instance] | Lost) -> None:
        changed = self._view.apply(event, self._clock())
        self._deadline_moved.set()
        if changed:
            self._tell_listeners()

    async def _expire_forever(self) -> None:
        while True:
            deadline_s = self._view.next_deadline_s
            self._deadline_moved.clear()
            if deadline_s is None:
                await self._deadline_moved.wait()
            else:
                await wait_or_timeout(self._deadline_moved, deadline_s - self._clock())
                if self._view.expire(self._clock()):
                    self._tell_listeners()

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            listener()


class Registration:
    """Keeps this process registered with every replica. `describe` returns its whole record, as it is now."""

    def __init__(self, addresses: Sequence[str], describe: Callable[[], Instance]) -> None:
        self._addresses = tuple(addresses)
        self._describe = describe
        self._nudges = {address: asyncio.Event() for address in self._addresses}
        self._sequence = 0

    def nudge(self) -> None:
        """Send a heartbeat at once: the record changed in a way that others wait for."""
        for event in self._nudges.values():
            event.set()

    async def run(self) -> None:
        """Heartbeat until cancelled, then say goodbye. Raises `Evicted` when a newer instance has our address."""
        tasks = [asyncio.ensure_future(self._register(address)) for address in self._addresses]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            await asyncio.gather(*(self._say_goodbye(address) for address in self._addresses))
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _register(self, address: str) -> None:
        link = _Link(address, "registering with", on_lost=lambda: None)
        await link.run(lambda stub: self._heartbeat_forever(stub, link, self._nudges[address]))

    async def _heartbeat_forever(self, stub: BootstrapStub, link: _Link, nudge: asyncio.Event) -> None:
        call = stub.Register()
        while True:
            nudge.clear()
            await call.write(self._heartbeat())
            async with asyncio.timeout(_REPLY_TIMEOUT_S):
                reply = await call.read()
            if not isinstance(reply, HeartbeatReply):
                return  # grpc.aio.EOF
            if reply.evicted:
                raise Evicted(f"a newer instance registered at our address {self._describe().address}")
            link.established()
            await wait_or_timeout(nudge, reply.interval_ms / 1000)

    def _heartbeat(self) -> bootstrap_pb2.Heartbeat:
        self._sequence += 1
        return bootstrap_pb2.Heartbeat(sequence=self._sequence, instance=self._describe())

    async def _say_goodbye(self, address: str) -> None:
        """Best effort, on a stream of its own: cancelling a read or a write has cancelled the other one."""
        heartbeat = self._heartbeat()
        heartbeat.instance.state = bootstrap_pb2.INSTANCE_STATE_GONE
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S), _channel(address) as channel:
                call = BootstrapStub(channel).Register()
                await call.write(heartbeat)
                await call.read()
        except (grpc.aio.AioRpcError, TimeoutError):
            logger.debug("no goodbye to bootstrap at %s: it is away", address)


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class _Link:
    """One replica: runs a session with it again and again, and says in the log when it comes and goes."""

    def __init__(self, address: str, purpose: str, on_lost: Callable[[], None]) -> None:
        self._address = address
        self._purpose = purpose
        self._on_lost = on_lost
        self._delay_s = _FIRST_RETRY_S
        self._is_up: bool | None = None  # None: not known yet

    async def run(self, session: Callable[[BootstrapStub], Awaitable[None]]) -> None:
        """Run `session` for ever. It calls `established` when the replica has answered."""
        async with _channel(self._address) as channel:
            while True:
                try:
                    await session(BootstrapStub(channel))
                    self._note_lost("the stream ended")
                except grpc.aio.AioRpcError as error:
                    self._note_lost(error.details() or error.code().name)
                except (TimeoutError, asyncio.InvalidStateError):  # the latter: the stream ended under a write
                    self._note_lost("no answer")
                await asyncio.sleep(self._delay_s * random.uniform(0.5, 1.0))
                self._delay_s = min(self._delay_s * 2, _MAX_RETRY_S)

    def established(self) -> None:
        """Note that the replica has answered."""
        if not self._is_up:
            logger.info("%s bootstrap at %s", self._purpose, self._address)
        self._is_up = True
        self._delay_s = _FIRST_RETRY_S

    def _note_lost(self, reason: str) -> None:
        self._on_lost()
        if self._is_up is not False:
            logger.warning("%s bootstrap at %s: away (%s); trying again", self._purpose, self._address, reason)
        self._is_up = False


def _to_event(replica: int, update: bootstrap_pb2.WatchUpdate) -> Snapshot[Instance] | Update[Instance]:
    records = tuple(to_record(instance) for instance in update.upserts)
    if update.snapshot:
        return Snapshot(replica, records)
    return Update(replica, records, tuple(update.removed))


def to_record(instance: Instance) -> Record[Instance]:
    """Return what membership decides by. Raises `ValueError` for a state that this version does not know."""
    address = f"{instance.address}#{instance.dp_rank}" if instance.dp_rank else instance.address
    return Record(instance.instance_id, address, State(instance.state), payload=instance)
