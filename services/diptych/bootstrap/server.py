"""Serves the membership over gRPC: one stream for each instance that registers, one for each watcher.

Only this module has a clock. Messages are bytes here; a message that can't be read is refused with a reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from diptych.bootstrap.announcement import Announcement
from diptych.bootstrap.caller import Caller, Limits, Pace
from diptych.bootstrap.membership import Delta
from diptych.bootstrap.outbox import SILENCES_A_LEASE, Outbox
from diptych.bootstrap.replica import NUM_TURNS, Replica, ReplicaSnapshot
from diptych.common.errors import Forbidden, InvalidRequest, Overloaded
from diptych.common.event_loop import wait_or_timeout
from diptych.common.net.reachable import peer_host
from diptych.common.trust.gatekeeper import parties_of
from diptych.common.trust.instance_secret import proven
from diptych.common.trust.trust import Trust
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import HeartbeatReply, WatchRequest

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Clock: TypeAlias = Callable[[], float]

SERVICE: Final = bootstrap_pb2.DESCRIPTOR.services_by_name["Bootstrap"].full_name
LOADS_EVERY_S: Final = 1.0  # to each watcher
DEFAULT_LIMITS: Final = Limits()


class BootstrapService:
    """Serves `diptych.v1.Bootstrap`. `run` must be running."""

    def __init__(
        self,
        trust: Trust,
        *,
        lease_s: float,
        heartbeat_s: float,
        limits: Limits = DEFAULT_LIMITS,
        clock: Clock = time.monotonic,
    ) -> None:
        self._trust = trust
        self._replica = Replica(lease_s=lease_s, limits=limits)
        self._lease_s = lease_s
        self._clock = clock
        self._filled: dict[Outbox, asyncio.Event] = {}
        timing = HeartbeatReply(interval_ms=round(heartbeat_s * 1000), lease_ms=round(lease_s * 1000))
        evicted = HeartbeatReply(interval_ms=timing.interval_ms, lease_ms=timing.lease_ms, evicted=True)
        self._replies = {False: timing.SerializeToString(), True: evicted.SerializeToString()}

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Register": grpc.stream_stream_rpc_method_handler(self.register),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def register(self, heartbeats: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Receive the heartbeats of one instance."""
        pace, caller = Pace(self._clock()), self._caller(context)
        async for data in heartbeats:
            now_s = self._clock()
            try:
                pace.count(now_s)
                delta = self._replica.receive(data, now_s, caller)
            except (InvalidRequest, Forbidden, Overloaded) as error:
                logger.warning("refused a heartbeat of %s: %s", context.peer(), error)
                await context.abort(grpc.StatusCode[error.grpc_status], str(error))
            self._note(delta)
            yield self._replies[delta.evicted]

    async def watch(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """Send everything that is listed, then what changes, and that we are there."""
        try:
            outbox = self._replica.open(with_loads=not _read(request).without_loads, caller=self._caller(context))
        except (InvalidRequest, Overloaded) as error:
            await context.abort(grpc.StatusCode[error.grpc_status], str(error))
        filled = self._filled[outbox] = asyncio.Event()
        try:
            while True:
                filled.clear()
                if outbox.is_empty or not self._replica.may_pop(outbox):
                    await wait_or_timeout(filled, self._lease_s / SILENCES_A_LEASE)
                if self._replica.may_pop(outbox):
                    yield self._replica.pop(outbox)
        finally:
            del self._filled[outbox]
            self._replica.close(outbox)

    def _caller(self, context: Context) -> Caller:
        shown = proven(context.invocation_metadata() or ())
        return Caller(parties_of(self._trust, context), peer_host(context.peer()), shown)

    async def snapshot(self) -> ReplicaSnapshot:
        return self._replica.snapshot()

    async def run(self) -> None:
        """End leases when they are due, and tell loads now and then."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_forever())
            tasks.create_task(self._announce_loads_forever())

    async def _expire_forever(self) -> None:
        while True:
            wake_s = self._next_wake_s()
            await asyncio.sleep(wake_s - self._clock())
            now_s = self._clock()
            if now_s - wake_s > self._lease_s / 4:  # paused, or starved: heartbeats wait to be read
                logger.warning("did not run for %.1f s: everybody gets a fresh lease", now_s - wake_s)
                self._replica.excuse(now_s)
            self._note(self._replica.tick(now_s))

    def _next_wake_s(self) -> float:
        """Early enough for what is due, and often enough to see that we were paused."""
        now_s, deadline_s = self._clock(), self._replica.next_deadline_s
        wake_s = now_s + self._lease_s / 4
        return wake_s if deadline_s is None else min(wake_s, max(now_s, deadline_s))

    async def _announce_loads_forever(self) -> None:
        while True:
            await asyncio.sleep(LOADS_EVERY_S / NUM_TURNS)
            self._wake(self._replica.announce_loads())

    def _note(self, delta: Delta[Announcement]) -> None:
        if delta.is_news:
            self._wake(self._filled)

    def _wake(self, outboxes: Iterable[Outbox]) -> None:
        for outbox in outboxes:
            self._filled[outbox].set()


def _read(request: bytes) -> WatchRequest:
    try:
        return WatchRequest.FromString(request)
    except DecodeError:
        raise InvalidRequest("this is no diptych.v1.WatchRequest") from None
