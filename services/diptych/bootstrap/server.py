"""The gRPC face of the membership: one stream for each instance that registers, one for each watcher.

Only this module has a clock. Heartbeats and lease ends go through `Membership.apply`; what changed goes to every
watcher's `Outbox`, which keeps at most one entry for each instance however slowly its watcher reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from google.protobuf.message import Message

from diptych.bootstrap.membership import Delta, Heartbeat, Membership, Move, Standing, Tick
from diptych.common.errors import InvalidRequest, InvalidTransition
from diptych.common.membership_client import to_record
from diptych.v1 import bootstrap_pb2, bootstrap_pb2_grpc
from diptych.v1.bootstrap_pb2 import HeartbeatReply, Instance, WatchUpdate

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Message, Message]"


@dataclass(slots=True)
class Outbox:
    """What one watcher has not been told yet."""

    upserts: dict[int, Instance] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    revision: int = 0

    def put(self, delta: Delta[Instance]) -> None:
        """Add a change; a later one about the same instance replaces an earlier one."""
        for record in delta.upserts:
            self.removed.discard(record.instance_id)
            self.upserts[record.instance_id] = record.payload
        for instance_id in delta.removed:
            self.upserts.pop(instance_id, None)
            self.removed.add(instance_id)
        self.filled.set()

    def take(self, *, snapshot: bool = False) -> WatchUpdate:
        """Return everything that is due and forget it."""
        self.revision += 1
        update = WatchUpdate(
            revision=self.revision, snapshot=snapshot, upserts=self.upserts.values(), removed=self.removed
        )
        self.upserts.clear()
        self.removed.clear()
        self.filled.clear()
        return update


class BootstrapService(bootstrap_pb2_grpc.BootstrapServicer):
    """Serves `diptych.v1.Bootstrap`. `expire_forever` must be running."""

    def __init__(self, *, lease_s: float, heartbeat_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._membership: Membership[Instance] = Membership(lease_s=lease_s)
        self._timing = HeartbeatReply(interval_ms=round(heartbeat_s * 1000), lease_ms=round(lease_s * 1000))
        self._clock = clock
        self._outboxes: list[Outbox] = []
        self._heard = asyncio.Event()

    async def Register(
        self, request_iterator: AsyncIterator[bootstrap_pb2.Heartbeat], context: Context
    ) -> AsyncIterator[HeartbeatReply]:
        """Take the heartbeats of one instance."""
        async for message in request_iterator:
            try:
                delta = self._apply(_to_heartbeat(message))
            except (InvalidRequest, InvalidTransition) as error:
                logger.warning("refused a heartbeat of %s: %s", context.peer(), error)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            yield HeartbeatReply(
                interval_ms=self._timing.interval_ms, lease_ms=self._timing.lease_ms, evicted=delta.evicted
            )

    async def Watch(self, request: bootstrap_pb2.WatchRequest, context: Context) -> AsyncIterator[WatchUpdate]:
        """Send everything that is listed, then what changes."""
        outbox = Outbox()
        outbox.put(Delta(upserts=self._membership.snapshot()))
        self._outboxes.append(outbox)
        try:
            yield outbox.take(snapshot=True)
            while True:
                await outbox.filled.wait()
                yield outbox.take()
        finally:
            self._outboxes.remove(outbox)

    async def expire_forever(self) -> None:
        """End leases when they are due. Sleeps in between."""
        while True:
            deadline_s = self._membership.next_deadline_s
            if deadline_s is None:
                self._heard.clear()
                await self._heard.wait()
            else:
                await asyncio.sleep(max(0.0, deadline_s - self._clock()))
                self._apply(Tick())

    def _apply(self, event: Heartbeat[Instance] | Tick) -> Delta[Instance]:
        delta = self._membership.apply(event, self._clock())
        self._heard.set()
        for move in delta.moves:
            _log(move)
        if delta.upserts or delta.removed:
            for outbox in self._outboxes:
                outbox.put(delta)
        return delta


def _to_heartbeat(message: bootstrap_pb2.Heartbeat) -> Heartbeat[Instance]:
    instance = message.instance
    if not instance.instance_id or not instance.address or not instance.role:
        raise InvalidRequest("a heartbeat needs instance_id, role and address")
    try:
        record = to_record(instance)
    except ValueError:
        raise InvalidRequest(f"state {instance.state} is unknown to this version") from None
    return Heartbeat(record, message.sequence)


def _log(move: Move[Instance]) -> None:
    instance = move.record.payload
    role = bootstrap_pb2.Role.Name(instance.role).removeprefix("ROLE_").lower()
    level = logging.WARNING if move.after in (Standing.EXPIRED, Standing.EVICTED) else logging.INFO
    logger.log(level, "%s %016x at %s is %s", role, instance.instance_id, instance.address, move.after.value)
