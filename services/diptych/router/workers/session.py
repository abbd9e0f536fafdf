"""The one stream between this router and a worker: connects, verifies whom it reached, reconnects, delivers outputs.

Rule: a session is open only while its stream lives and `GetStatus` over the same connection named the expected
instance. When it breaks, the worker aborts its legs and we tell their owners at once; none survives a reconnect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import grpc

from diptych.common.event_loop import raise_if_cancelled, wait_or_timeout
from diptych.common.members.roles import LegKind
from diptych.common.net.rpc import open_channel
from diptych.common.trust.trust import Trust
from diptych.generation.request_groups import MAX_TOOL_LEN
from diptych.router.choose.estimates import Estimates
from diptych.router.choose.prefix_index import KvNews, PrefixIndex
from diptych.router.metrics import RouterMetrics
from diptych.router.workers.known_worker import KnownWorker
from diptych.router.workers.learning import learn
from diptych.router.workers.legs import Leg, LegReceiver, OpenLegs, Work
from diptych.router.workers.outbox import Outbox, open_session
from diptych.router.workers.worker_view import WorkerLoad, WorkerView
from diptych.v1 import bootstrap_pb2
from diptych.v1.worker_pb2 import KvEvents, StartLeg, StatusRequest, WorkerBatch
from diptych.v1.worker_pb2_grpc import WorkerStub

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S: Final = 10.0
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 2.0
SESSION_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1),)  # no reconnect backoff inherited from an earlier one


class WrongInstance(Exception):
    """Another instance answers at the address."""


class Session:
    """A worker as this router reaches it. `run` keeps the stream up until it is cancelled."""

    def __init__(
        self,
        instance: bootstrap_pb2.Instance,
        trust: Trust,
        on_change: Callable[[], None],
        index: PrefixIndex,
        estimates: Estimates,
        metrics: RouterMetrics,
        router_id: int,
    ) -> None:
        self.instance_id = instance.instance_id
        self.worker = KnownWorker(instance)
        self._trust = trust
        self._on_change = on_change
        self._index = index  # learns here what the worker has cached
        self.estimates = estimates  # and how fast it is
        self._metrics = metrics
        self._router_id = router_id  # our own instance, for the worker to know us by
        self._legs = OpenLegs()
        self._idle = asyncio.Event()  # no leg is open
        self._idle.set()
        self._outbox: Outbox | None = None
        self._is_told = False  # the worker has told its record over the open stream
        self._serving = asyncio.Event()  # the worker has loaded its model
        self._note_state()

    # what is known of the worker

    @property
    def is_open(self) -> bool:
        return self._outbox is not None

    @property
    def num_open_legs(self) -> int:
        return len(self._legs)

    def update(self, instance: bootstrap_pb2.Instance) -> None:
        """Take what bootstrap says of the worker, until it tells us itself: bootstrap's word may be older."""
        if not self._is_told:
            self._on_load(instance.load)
            self._on_record(instance)

    def view(self) -> WorkerView:
        return self.worker.view(is_reached=self.is_open)

    def load(self) -> WorkerLoad:
        return self._legs.load(self.worker.reported)

    # legs

    def start(self, kind: LegKind, leg: StartLeg, prompt: bytes, work: Work, receiver: LegReceiver) -> None:
        """Send a leg and its prompt. The session must be open; `receiver` gets its outputs up to the last one."""
        assert self._outbox is not None, "a leg needs an open session"
        self._idle.clear()
        self._legs.add(leg.room, Leg(receiver, kind, work, leg.peer_instance_id, leg.num_prior_output_tokens))
        leg.kind = kind.wire
        self._outbox.start(leg, prompt)

    def abort(self, room: int) -> None:
        """Tell the worker to end a leg, unless it has ended. Its last output still comes."""
        if self._legs.mark_aborted(room) and self._outbox is not None:
            self._outbox.abort(room)

    def tool_called(self, room: int, tool: str) -> None:
        """Tell the worker that a request which ends there has called a tool. If that is lost, nothing is but time."""
        if self._outbox is not None:
            self._outbox.tool_called(room, tool[:MAX_TOOL_LEN])

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until no leg is open, for `timeout_s` at most."""
        await wait_or_timeout(self._idle, timeout_s)

    # the stream

    async def run(self) -> None:
        """Serve sessions, one after the other, until cancelled."""
        await self._serving.wait()
        backoff_s = FIRST_BACKOFF_S
        while True:
            async with open_channel(self.worker.record.address, self._trust, SESSION_OPTIONS) as channel:
                was_open = await self._serve(channel)
            raise_if_cancelled()
            backoff_s = FIRST_BACKOFF_S if was_open else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _serve(self, channel: grpc.aio.Channel) -> bool:
        """Serve one session up to its end; return whether it was ever open."""
        outbox, reason = Outbox(), "left the membership"
        try:
            call = open_session(channel, outbox, (("diptych-instance", f"{self.instance_id:016x}"),))
            await self._verify(WorkerStub(channel))
            if not call.done():  # else it was refused, and reading it says why
                self._open(outbox)
            async for batch in call:
                self._receive(batch)
            reason = "the worker ended the session"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except WrongInstance as error:
            reason = str(error)
        except Exception as error:  # a malformed message must cost this session, not the router
            logger.exception("the session to %s failed", self.worker)
            reason = f"internal error: {error}"
        finally:
            was_open = self.is_open
            outbox.close()
            self._index.forget(self.instance_id)
            self._close(reason)
        return was_open

    async def _verify(self, stub: WorkerStub) -> None:
        """Raise unless the expected instance answers: after a restart another one may have the address."""
        status = await stub.GetStatus(StatusRequest(instance_id=self.instance_id), timeout=STATUS_TIMEOUT_S)
        found = status.instance.instance_id
        if found != self.instance_id:
            raise WrongInstance(f"instance {found:016x} answers at {self.worker.record.address}")

    def _open(self, outbox: Outbox) -> None:
        logger.info("connected to %s", self.worker)
        self._outbox = outbox
        outbox.introduce(self._router_id)
        self._on_change()

    def _close(self, reason: str) -> None:
        if self._outbox is None:
            logger.info("no session to %s: %s", self.worker, reason)
            return
        level = logging.WARNING if self._legs else logging.INFO
        logger.log(level, "lost %s with %d open legs: %s", self.worker, len(self._legs), reason)
        self._outbox, self._is_told = None, False
        self._legs.lose_all(f"lost {self.worker}: {reason}")
        self._idle.set()
        self._on_change()

    def _receive(self, batch: WorkerBatch) -> None:
        if batch.HasField("instance"):  # first: it may say why legs end
            self._is_told = True
            self._on_record(batch.instance)
            self._on_change()
        now_s = time.monotonic()
        for output in batch.outputs:
            leg = self._legs.deliver(output, now_s)
            if leg is None:
                logger.warning("%s sent an output for room %016x, which is not open", self.worker, output.room)
            elif output.finish_reason:
                self._metrics.leg_finished(leg.kind, output.stats)
                learn(self.estimates, self.instance_id, self.load, leg, output, now_s)
        if not self._legs:
            self._idle.set()
        if batch.HasField("load"):
            self._on_load(batch.load)
        if batch.HasField("kv_events"):
            self._on_kv_events(batch.kv_events)

    def _on_record(self, record: bootstrap_pb2.Instance) -> None:
        self.worker.on_record(record)
        self._note_state()

    def _on_kv_events(self, wire: KvEvents) -> None:
        below = [(each.level, each.stored) for each in wire.below]
        news = KvNews(wire.sequence, wire.cleared, wire.removed, wire.stored, wire.more, below)
        if not self._index.apply(self.instance_id, news):
            logger.warning("missed KV events of %s: asking for all", self.worker)
            self._metrics.kv_resyncs.inc()
            if self._outbox is not None:
                self._outbox.resync_kv()

    def _note_state(self) -> None:
        if self.worker.has_loaded:
            self._serving.set()

    def _on_load(self, load: bootstrap_pb2.WorkerLoad) -> None:
        self._legs.told()
        if self.worker.on_load(load):
            self._on_change()
