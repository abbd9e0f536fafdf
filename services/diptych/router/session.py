"""The one stream between this router and a worker: connects, verifies whom it reached, reconnects, delivers outputs.

Rule: a session is open only while its stream lives and `GetStatus` over the same connection named the expected
instance. When it breaks, the worker aborts its legs and we tell their owners at once; none survives a reconnect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import grpc

from diptych.common.membership import State
from diptych.common.rpc import CHANNEL_OPTIONS
from diptych.router.legs import LegReceiver, OpenLegs
from diptych.router.metrics import RouterMetrics
from diptych.router.outbox import Outbox
from diptych.router.prefix_index import KvNews, PrefixIndex
from diptych.router.worker_view import Role, WorkerLoad, WorkerView
from diptych.v1 import bootstrap_pb2
from diptych.v1.worker_pb2 import KvEvents, LegOutput, StartLeg, StatusRequest, WorkerBatch
from diptych.v1.worker_pb2_grpc import WorkerStub

logger = logging.getLogger(__name__)

ROLES: Final = {bootstrap_pb2.ROLE_PREFILL: Role.PREFILL, bootstrap_pb2.ROLE_DECODE: Role.DECODE}
STATUS_TIMEOUT_S: Final = 10.0
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 2.0
SESSION_OPTIONS: Final = (
    *CHANNEL_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # no reconnect backoff inherited from an earlier session
)


class WrongInstance(Exception):
    """Another instance answers at the address."""


class Session:
    """A worker as this router reaches it. `run` keeps the stream up until it is cancelled."""

    def __init__(
        self,
        instance: bootstrap_pb2.Instance,
        on_change: Callable[[], None],
        index: PrefixIndex,
        metrics: RouterMetrics,
    ) -> None:
        self.instance_id = instance.instance_id
        self.role = ROLES[instance.role]
        self._instance = instance
        self._load = instance.load
        self._linked = frozenset(instance.load.linked_instances)
        self._on_change = on_change
        self._index = index  # learns here what the worker has cached
        self._metrics = metrics
        self._legs = OpenLegs()
        self._outbox: Outbox | None = None
        self._serving = asyncio.Event()  # the worker has loaded its model
        self._note_state()

    def __str__(self) -> str:
        return f"{self.role.value} worker {self.instance_id:016x} at {self._instance.address}"

    # what is known of the worker

    @property
    def is_open(self) -> bool:
        return self._outbox is not None

    @property
    def is_ready(self) -> bool:
        return State(self._instance.state) is State.READY

    @property
    def model_id(self) -> str:
        """The name of what the worker serves now."""
        return self._instance.model_id

    @property
    def compat(self) -> str:
        return self._instance.compat

    @property
    def context_len(self) -> int:
        return self._instance.context_len

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters that the worker has loaded: name to fingerprint."""
        return {adapter.name: adapter.fingerprint for adapter in self._instance.loras}

    @property
    def instance(self) -> bootstrap_pb2.Instance:
        """The worker's newest record."""
        return self._instance

    @property
    def num_open_legs(self) -> int:
        return len(self._legs)

    def update(self, instance: bootstrap_pb2.Instance) -> None:
        """Take a newer record of the same instance."""
        if instance.load != self._instance.load:  # else the stream's own reports are newer
            self._take_load(instance.load)
        self._instance = instance
        self._note_state()

    def view(self) -> WorkerView:
        instance, state = self._instance, State(self._instance.state)
        return WorkerView(
            self.instance_id,
            self.role,
            state,
            instance.started_as or instance.model_id,
            instance.compat,
            self.is_open,
            self._linked,
            self.adapters,
            instance.paused,
            instance.not_ready,
        )

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            num_requests=max(self._load.num_waiting + self._load.num_running, len(self._legs)),
            queued_tokens=max(self._load.waiting_tokens, self._legs.queued_tokens),
            free_tokens=self._load.free_pages * self._instance.transfer.layout.page_size,
            has_credit=self._load.grantable_pages > 0,
            queued_transfer_bytes=self._load.queued_transfer_bytes,
            link_speeds={link.peer_instance_id: link.bytes_per_s for link in self._load.link_speeds},
        )

    # legs

    def start(self, leg: StartLeg, receiver: LegReceiver) -> None:
        """Send a leg. The session must be open; `receiver` gets its outputs up to the last one."""
        assert self._outbox is not None, "a leg needs an open session"
        self._legs.add(leg.room, receiver, len(leg.prompt_token_ids))
        self._outbox.start(leg)

    def abort(self, room: int) -> None:
        """Tell the worker to end a leg, unless it has ended. Its last output still comes."""
        if self._legs.mark_aborted(room) and self._outbox is not None:
            self._outbox.abort(room)

    # the stream

    async def run(self) -> None:
        """Serve sessions, one after the other, until cancelled."""
        await self._serving.wait()
        backoff_s = FIRST_BACKOFF_S
        while True:
            async with grpc.aio.insecure_channel(self._instance.address, options=SESSION_OPTIONS) as channel:
                was_open = await self._serve(WorkerStub(channel))
            backoff_s = FIRST_BACKOFF_S if was_open else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _serve(self, stub: WorkerStub) -> bool:
        """Serve one session up to its end; return whether it was ever open."""
        outbox, reason = Outbox(), "left the membership"
        try:
            call = stub.Session(outbox, metadata=(("diptych-instance", f"{self.instance_id:016x}"),))
            await self._verify(stub)
            self._open(outbox)
            async for batch in call:
                self._receive(batch)
            reason = "the worker ended the session"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except WrongInstance as error:
            reason = str(error)
        except Exception as error:  # a malformed message must cost this session, not the router
            logger.exception("the session to %s failed", self)
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
            raise WrongInstance(f"instance {found:016x} answers at {self._instance.address}")

    def _open(self, outbox: Outbox) -> None:
        logger.info("connected to %s", self)
        self._outbox = outbox
        self._on_change()

    def _close(self, reason: str) -> None:
        if self._outbox is None:
            logger.info("no session to %s: %s", self, reason)
            return
        level = logging.WARNING if self._legs else logging.INFO
        logger.log(level, "lost %s with %d open legs: %s", self, len(self._legs), reason)
        self._outbox = None
        self._legs.lose_all(f"lost {self}: {reason}")
        self._on_change()

    def _receive(self, batch: WorkerBatch) -> None:
        for output in batch.outputs:
            self._observe(output)
            if not self._legs.deliver(output):
                logger.warning("%s sent an output for room %016x, which is not open", self, output.room)
        if batch.HasField("load"):
            self._take_load(batch.load)
        if batch.HasField("kv_events"):
            self._take_kv_events(batch.kv_events)

    def _take_kv_events(self, wire: KvEvents) -> None:
        news = KvNews(wire.sequence, wire.cleared, wire.removed, wire.stored, wire.more)
        if not self._index.apply(self.instance_id, news):
            logger.warning("missed KV events of %s: asking for all", self)
            self._metrics.kv_resyncs.inc()
            if self._outbox is not None:
                self._outbox.resync_kv()

    def _observe(self, output: LegOutput) -> None:
        if output.finish_reason:
            self._metrics.leg_finished(self.role, output.stats)

    def _note_state(self) -> None:
        if State(self._instance.state) is not State.STARTING:
            self._serving.set()

    def _take_load(self, load: bootstrap_pb2.WorkerLoad) -> None:
        self._load = load
        linked = frozenset(load.linked_instances)
        if linked != self._linked:
            self._linked = linked
            self._on_change()
