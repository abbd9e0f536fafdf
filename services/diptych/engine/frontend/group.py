"""One scheduler group of a worker as the world sees it: an instance with its own record, sessions and peers.

Relays batches between router sessions and the scheduler; it decides nothing. When the scheduler dies every session
ends with `SchedulerDied`, as if the whole worker had died, and routers place its requests elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from diptych.common.event_loop import wait_or_timeout
from diptych.common.members.record import State
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.common.members.terms import terms_of
from diptych.engine.frontend.departure import Departure, LastWork, OpenWork
from diptych.engine.frontend.health import SchedulerLiveness
from diptych.engine.frontend.peers import Peers
from diptych.engine.frontend.probes import InstanceFacts, Readiness
from diptych.engine.frontend.scheduler_client import PendingQueries, SchedulerClient, SchedulerDied
from diptych.engine.frontend.sessions import Session, Sessions, hide_link_key
from diptych.engine.frontend.text_legs import TextLegs
from diptych.engine.frontend.tokenizer_manager import TokenizerManager
from diptych.engine.frontend.watchers import LEASE_S, RENEW_S, Watchers
from diptych.engine.scheduler.messages import fields_said
from diptych.kvtransfer.lanes import Requirement
from diptych.v1 import admin_pb2, bootstrap_pb2, engine_pb2, worker_pb2

logger = logging.getLogger(__name__)


class WorkerGroup:
    """An instance of a worker. `relay` must be running."""

    def __init__(
        self,
        scheduler: SchedulerClient,
        instance: bootstrap_pb2.Instance,
        sessions: Sessions,
        on_news: Callable[[], None],
        prompts: TokenizerManager,
        stall_s: float,
        release_s: float,
        num_move_links: int = 0,
        drain_cache_s: float = 0.0,
    ) -> None:
        self.scheduler = scheduler
        self.liveness = SchedulerLiveness(scheduler, stall_s, self._on_silence)
        self.instance_id, self.dp_rank = instance.instance_id, instance.dp_rank
        self._instance = instance
        self._readiness = Readiness(instance)
        self._max_requests = self._max_step_tokens = 0  # what the scheduler found right; 0: it has not loaded
        self._computing = worker_pb2.Computing()
        self._on_news = on_news  # called when others should hear of the record at once
        self._sessions = sessions
        self.peers = Peers(instance, scheduler, self._on_peers, num_move_links)
        self._ready_news = asyncio.Event()
        self.updating = asyncio.Lock()  # held while the weights or the role change
        self.model_before = ""  # as for --model: what was served before weights were replaced in place
        self._death: asyncio.Future[SchedulerDied] = asyncio.get_running_loop().create_future()
        self.queries = PendingQueries(scheduler, self._death)
        self._watchers = Watchers()
        self._legs = TextLegs(scheduler, prompts, sessions.deliver, lambda: instance.context_len)
        work = OpenWork(sessions, self._legs, self.queries)
        last_work = LastWork(work, scheduler, drain_cache_s)
        self.departure = Departure(work, last_work, sessions, instance, self._announce, release_s)
        self._handlers: Mapping[str, Callable[[Any], None]] = {  # by field, in the order in which they act
            "tokens": sessions.deliver_tokens,
            "outputs": self._on_outputs,
            "pong": self.liveness.on_pong,
            "load": self._on_load,
            "link_news": self._on_link_news,
            "kv_events": sessions.announce_kv,
            "status": self.queries.on_status,
            "status_answers": self.queries.on_status_answers,
            "admin_answers": self.queries.on_admin_answers,
            "context_len": self._on_context_len,
            "news": self._watchers.on_news,
            "loras": self._on_loras,
        }

    def __str__(self) -> str:
        return f"{self.instance_id:016x} at {self._instance.address}#{self.dp_rank}"

    @property
    def role(self) -> Role:
        """What is served now."""
        return WORKER_ROLES[self._instance.role]

    @property
    def weights_version(self) -> str:
        """What the weights are called that are served."""
        return self._instance.weights_version

    @property
    def num_open_rooms(self) -> int:
        return self._sessions.num_open_rooms

    @property
    def is_loaded(self) -> bool:
        return bool(self._instance.compat)

    @property
    def facts(self) -> InstanceFacts:
        """What probes judge this instance by."""
        return InstanceFacts(
            rank=self.dp_rank,
            is_loaded=self.is_loaded,
            state=State(self._instance.state),
            not_ready=self._instance.not_ready,
            paused=self._sessions.closed_because,
            silent_s=self.liveness.unready_s,
            num_routers=len(self._sessions.routers),
            beat_s=self.scheduler.heartbeat.last_s,
        )

    def describe(self) -> bootstrap_pb2.Instance:
        """Return the membership record as it is now."""
        self._instance.load.CopyFrom(self._sessions.load)
        return self._instance

    def listen_at(self, address: str, metrics_address: str) -> None:
        self._instance.address, self._instance.metrics_address = address, metrics_address

    async def load(self, requirement: Requirement) -> None:
        """Wait until the model is loaded, then tell others how to reach us. Raises `SchedulerDied`."""
        ready = await self.scheduler.ready()
        self._set_terms(ready.terms)
        self._instance.weights_version = ready.terms.weights
        self._on_context_len(ready.context_len)
        self._instance.transfer.CopyFrom(ready.transfer)
        self._instance.loras.extend(ready.loras.adapters)
        self._max_requests, self._max_step_tokens = ready.max_requests, ready.max_step_tokens
        self._computing = ready.computing
        if ready.makes_vectors:
            self._readiness.loaded_alone()
        else:
            self._readiness.loaded(requirement)
        self._announce()
        logger.info("loaded as %s, metrics at %s; %s", self, self._instance.metrics_address, self._instance.not_ready)

    async def relay(self) -> None:
        """Pass on what the scheduler says, for ever. Raises `SchedulerDied`."""
        try:
            async for events in self.scheduler.events():
                self._on_events(events)
        except SchedulerDied as death:
            self._death.set_result(death)
            raise

    def _announce(self) -> None:
        """Others shall hear of the record at once: bootstrap, and every router over its session."""
        self._on_news()
        self._sessions.set_record(self._instance)

    def rename(self, served: admin_pb2.SwitchWeightsResult) -> None:
        """Something else is served from now on. Only peers whose terms match are linked."""
        self._instance.model_id = served.model_id
        self._set_terms(served.terms)
        self._instance.weights_version = served.version
        self.peers.look_again()
        self._announce()

    async def serve(self, role: Role) -> None:
        """Serve a role from now on. Nothing may be open. Raises `SchedulerDied`."""
        await self.scheduler.send(engine_pb2.SchedulerCommands(role=role.wire))
        await self.queries.status()  # answered behind it
        self._instance.role = role.wire
        self._sessions.role = role
        self._ready_news.clear()
        self._readiness.role_changed()
        self._on_peers()
        self.peers.look_again()

    async def wait_for_link(self, timeout_s: float) -> str:
        """Wait until it is ready, if a peer is known to wait for; return why it is not."""
        if self._readiness.is_pending and self.peers.num_known:
            await wait_or_timeout(self._ready_news, timeout_s)
        return self._instance.not_ready

    async def session(
        self, batches: AsyncIterator[worker_pb2.RouterBatch]
    ) -> AsyncGenerator[worker_pb2.WorkerBatch, None]:
        """Serve one router until its stream ends. Raises `SchedulerDied` and `SchedulerSilent`."""
        session = self._sessions.open()
        reader = asyncio.create_task(self._read(session, batches))
        try:
            while not reader.done():
                batch = asyncio.ensure_future(session.next_batch())
                try:
                    ends = (batch, reader, self._death, self.liveness.silence)
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    batch.cancel()  # does nothing once it is done
                if batch.done():
                    yield batch.result()
                elif self._death.done():
                    raise self._death.result()
                elif self.liveness.silence.done():
                    raise self.liveness.silence.result()
            await reader
        finally:
            reader.cancel()
            await self._abandon(session)

    async def status(self) -> worker_pb2.WorkerStatus:
        """Ask the scheduler. Raises `SchedulerDied`, and `SchedulerSilent` soon where no answer comes."""
        asking = asyncio.ensure_future(self.queries.status())
        silence = asyncio.ensure_future(self.liveness.is_silent.wait())
        try:
            await asyncio.wait((asking, silence), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise self.liveness.complaint()
            status = asking.result()
        finally:
            asking.cancel()
            silence.cancel()
        self._complete(status)
        return status

    async def watch(self, interval_s: float = 0.0) -> AsyncGenerator[worker_pb2.WorkerNews, None]:
        """Tell one watcher what is done here, at most once in `interval_s`.

        Raises `Overloaded`, `SchedulerDied` and `SchedulerSilent`.
        """
        watcher = self._watchers.open()
        came = has_heard = False
        pause_s = 0.0  # that is left until it may be told again: the lease is renewed within it
        try:
            while True:
                if self.is_loaded and (not came or self._watchers.takes_lease()):
                    commands = engine_pb2.SchedulerCommands(watch_s=LEASE_S, watcher_came=not came)
                    came = True
                    await self.scheduler.send(commands)
                if pause_s > 0:
                    await self._until(asyncio.Event(), min(pause_s, RENEW_S))
                    pause_s -= RENEW_S
                elif await self._until(watcher.due, RENEW_S):
                    news = self._watchers.pop(watcher)
                    self._complete(news.status)
                    if has_heard:
                        news.status.instance.ClearField("transfer")
                    has_heard = True
                    yield news
                    pause_s = interval_s
        finally:
            self._watchers.close(watcher)

    async def _until(self, event: asyncio.Event, timeout_s: float) -> bool:
        """Wait for an event; False when it does not come in time. Raises `SchedulerDied` and `SchedulerSilent`."""
        coming = asyncio.ensure_future(event.wait())
        ends = (coming, self._death, self.liveness.silence)
        try:
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            coming.cancel()
        for end in (self._death, self.liveness.silence):
            if end.done():
                raise end.result()
        return event.is_set()

    def _complete(self, status: worker_pb2.WorkerStatus) -> None:
        """Add to what the scheduler says of itself what its frontend knows."""
        status.instance.CopyFrom(self.describe())
        hide_link_key(status.instance)
        status.max_requests, status.max_step_tokens = self._max_requests, self._max_step_tokens
        status.computing.CopyFrom(self._computing)
        if drain := self.departure.progress():
            status.drain.CopyFrom(drain)

    async def _read(self, session: Session, batches: AsyncIterator[worker_pb2.RouterBatch]) -> None:
        async for batch in batches:
            if batch.router_instance_id:
                self._sessions.acknowledge(session, batch.router_instance_id)
            accepted = self._sessions.start(session, batch.start)
            if batch.resync_kv:
                logger.warning("a router missed KV events: telling it all cached pages again")
                self._sessions.resync_kv(session)
            abort = self._sessions.owned(session, batch.abort)
            if accepted or abort or batch.tool_called:
                commands = engine_pb2.SchedulerCommands(start=accepted, abort=abort, tool_called=batch.tool_called)
                await self._legs.send(commands)

    async def _abandon(self, session: Session) -> None:
        """The router is gone: nobody wants its rooms."""
        rooms = self._sessions.close(session)
        if rooms:
            logger.info("a router session ended with %d open rooms: aborting them", len(rooms))
            await self._legs.send(engine_pb2.SchedulerCommands(abort=rooms))

    def _on_events(self, events: engine_pb2.SchedulerEvents) -> None:
        for name, value in fields_said(events, self._handlers):
            self._handlers[name](value)

    def _on_outputs(self, outputs: Iterable[worker_pb2.LegOutput]) -> None:
        self._legs.note(outputs)
        self._sessions.deliver(outputs)

    def _on_link_news(self, news: engine_pb2.LinkNews) -> None:
        if self._readiness.failed(news.problem):
            logger.warning("%s is not ready: %s", self, news.problem)
            self._announce()

    def _on_context_len(self, context_len: int) -> None:
        self._instance.context_len = self._sessions.context_len = context_len

    def _on_load(self, load: bootstrap_pb2.WorkerLoad) -> None:
        links_changed = load.linked_instances != self._sessions.load.linked_instances
        self._sessions.set_load(load)
        if links_changed:
            self.peers.linked(load.linked_instances)
            self._on_links()
            self._announce()

    def _on_silence(self, silent_s: int) -> None:
        """The scheduler can't say it: its frontend adds it to the load that was told last."""
        load = self._sessions.load
        if load.silent_s != silent_s:
            load.silent_s = silent_s
            self._sessions.set_load(load)
            self._on_news()

    def _on_links(self) -> None:
        if self._readiness.is_pending:
            linked = self._sessions.load.linked_instances
            self._note_ready(self._readiness.linked(self.peers.num_among(linked)))

    def _on_peers(self) -> None:
        """Members have come, gone or changed."""
        self._on_links()
        if self._readiness.is_pending:
            self._note_ready(self._readiness.knows_peers(self.peers.num_known))

    def _note_ready(self, is_ready: bool) -> None:
        if is_ready:
            logger.info("%s is ready", self)
            self._ready_news.set()
            self._announce()

    def _on_loras(self, loras: engine_pb2.LoraSet) -> None:
        del self._instance.loras[:]
        self._instance.loras.extend(loras.adapters)
        self._announce()

    def _set_terms(self, terms: bootstrap_pb2.Terms) -> None:
        self._instance.terms.CopyFrom(terms)
        self._instance.compat = self._sessions.compat = terms_of(terms).compat
