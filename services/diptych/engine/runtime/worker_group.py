"""One scheduler group of a worker as the world sees it: an instance with its own record, sessions and peers.

Relays batches between router sessions and the scheduler; it decides nothing. When the scheduler dies every session
ends with `SchedulerDied`, as if the whole worker had died, and routers place its requests elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Final

from diptych.common.membership_client import MembershipWatcher
from diptych.engine.runtime.pulse import Pulse
from diptych.engine.runtime.questions import Questions
from diptych.engine.runtime.scheduler_client import SchedulerClient, SchedulerDied
from diptych.engine.runtime.sessions import Session, Sessions
from diptych.kvtransfer.lanes import Requirement
from diptych.v1 import admin_pb2, bootstrap_pb2, engine_pb2, worker_pb2

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S: Final = 10.0  # aborted legs are answered within a step

_PEER_ROLE: Final[Mapping[int, int]] = {
    bootstrap_pb2.ROLE_PREFILL: bootstrap_pb2.ROLE_DECODE,
    bootstrap_pb2.ROLE_DECODE: bootstrap_pb2.ROLE_PREFILL,
}


class WorkerGroup:
    """An instance of a worker. `relay` must be running."""

    def __init__(
        self,
        scheduler: SchedulerClient,
        instance: bootstrap_pb2.Instance,
        sessions: Sessions,
        on_news: Callable[[], None],
        stall_s: float,
    ) -> None:
        self.scheduler = scheduler
        self.pulse = Pulse(scheduler, stall_s)
        self._instance = instance
        self._on_news = on_news  # called when others should hear of the record at once
        self._sessions = sessions
        self._peers_changed = asyncio.Event()
        self.updating = asyncio.Lock()  # held while the weights are replaced
        self._empty = asyncio.Event()
        self._empty.set()
        self._death: asyncio.Future[SchedulerDied] = asyncio.get_running_loop().create_future()
        self._questions = Questions(scheduler, self._death)

    def __str__(self) -> str:
        return f"{self._instance.instance_id:016x} at {self._instance.address}#{self._instance.dp_rank}"

    @property
    def instance_id(self) -> int:
        return self._instance.instance_id

    @property
    def dp_rank(self) -> int:
        return self._instance.dp_rank

    @property
    def is_loaded(self) -> bool:
        return bool(self._instance.compat)

    def describe(self) -> bootstrap_pb2.Instance:
        """Return the membership record as it is now."""
        self._instance.load.CopyFrom(self._sessions.load)
        return self._instance

    def listen_at(self, address: str, metrics_address: str) -> None:
        self._instance.address, self._instance.metrics_address = address, metrics_address

    async def load(self, requirement: Requirement) -> None:
        """Wait until the model is loaded, then tell others how to reach us. Raises `SchedulerDied`.

        Where links must meet a requirement, the instance is ready once one does.
        """
        ready = await self.scheduler.ready()
        self._instance.compat = self._sessions.compat = ready.compat
        self._instance.context_len = ready.context_len
        self._instance.transfer.CopyFrom(ready.transfer)
        self._instance.loras.extend(ready.loras.adapters)
        if requirement == "any":
            self._instance.state = bootstrap_pb2.INSTANCE_STATE_READY
        else:
            self._instance.not_ready = f"no peer is linked yet, and --kv-require asks for {requirement}"
        self._on_news()
        logger.info("serving as %s, metrics at %s", self, self._instance.metrics_address)
        if self._instance.not_ready:
            logger.warning("not ready: %s", self._instance.not_ready)

    async def relay(self) -> None:
        """Pass on what the scheduler says, for ever. Raises `SchedulerDied`."""
        try:
            async for events in self.scheduler.events():
                self._take(events)
        except SchedulerDied as death:
            self._death.set_result(death)
            raise

    async def follow_peers(self, watcher: MembershipWatcher) -> None:
        """Tell the scheduler the whole set of its peers, each time it changed, for ever.

        A link to a member stays when one of the two takes other weights: what they have in common must still be
        brought to its end, over that link. Nothing new is begun between them: routers don't pair them.
        """
        self._peers_changed.set()
        watcher.add_listener(self._peers_changed.set)
        known: dict[int, bytes] = {}
        while True:
            await self._peers_changed.wait()
            self._peers_changed.clear()
            others = watcher.instances().values()
            peers = [other for other in others if self._is_peer(other) or other.instance_id in known]
            members = {peer.instance_id: peer.transfer.engine_metadata for peer in peers}
            if members != known:
                known = members
                await self.scheduler.send(engine_pb2.SchedulerCommands(peers=engine_pb2.PeerView(instances=peers)))

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, and give what runs time to finish."""
        self._instance.state, self._instance.not_ready = bootstrap_pb2.INSTANCE_STATE_DRAINING, ""
        self._on_news()
        await self._finish_running(timeout_s)

    def pause(self, reason: str) -> None:
        """Refuse every new leg, so that routers use other workers."""
        self._instance.paused, self._sessions.closed_because = True, reason
        self._on_news()

    def resume(self) -> None:
        self._instance.paused, self._sessions.closed_because = False, ""
        self._on_news()

    def rename(self, model_id: str, compat: str) -> None:
        """Something else is served from now on. Only peers with an equal `compat` are linked."""
        self._instance.model_id = model_id
        self._instance.compat = self._sessions.compat = compat
        self._peers_changed.set()
        self._on_news()

    async def empty(self, timeout_s: float) -> None:
        """Give what runs time to finish, and abort the rest."""
        await self._finish_running(timeout_s)
        rooms = self._sessions.rooms()
        if rooms:
            logger.warning("aborting %d requests that did not finish within %g s", len(rooms), timeout_s)
            await self.scheduler.send(engine_pb2.SchedulerCommands(abort=rooms))
            await self._finish_running(ABORT_TIMEOUT_S)

    async def _finish_running(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    async def administer(self, command: admin_pb2.AdminCommand) -> admin_pb2.AdminAnswer:
        """Have the scheduler execute a command. Raises its refusal, a `DiptychError`; then nothing has changed."""
        return await self._questions.administer(command)

    async def session(
        self, batches: AsyncIterator[worker_pb2.RouterBatch]
    ) -> AsyncGenerator[worker_pb2.WorkerBatch, None]:
        """Serve one router until its stream ends. Raises `SchedulerDied` and `SchedulerSilent`."""
        session = self._sessions.open()
        reader = asyncio.create_task(self._read(session, batches))
        try:
            while not reader.done():
                take = asyncio.ensure_future(session.take())
                try:
                    ends = (take, reader, self._death, self.pulse.silence)
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    take.cancel()  # does nothing once it is done
                if take.done():
                    yield take.result()
                elif self._death.done():
                    raise self._death.result()
                elif self.pulse.silence.done():
                    raise self.pulse.silence.result()
            await reader
        finally:
            reader.cancel()
            await self._abandon(session)

    async def status(self) -> worker_pb2.WorkerStatus:
        """Ask the scheduler. Raises `SchedulerDied`."""
        status = await self._questions.status()
        status.instance.CopyFrom(self.describe())
        return status

    async def _read(self, session: Session, batches: AsyncIterator[worker_pb2.RouterBatch]) -> None:
        async for batch in batches:
            accepted = self._sessions.start(session, batch.start)
            if accepted:
                self._empty.clear()
            if batch.resync_kv:
                logger.warning("a router missed KV events: telling it all cached pages again")
                self._sessions.resync_kv(session)
            abort = self._sessions.owned(session, batch.abort)
            if accepted or abort:
                await self.scheduler.send(engine_pb2.SchedulerCommands(start=accepted, abort=abort))

    async def _abandon(self, session: Session) -> None:
        """The router is gone: nobody wants its rooms."""
        rooms = self._sessions.close(session)
        if rooms:
            logger.info("a router session ended with %d open rooms: aborting them", len(rooms))
            await self.scheduler.send(engine_pb2.SchedulerCommands(abort=rooms))
        self._note_empty()

    def _take(self, events: engine_pb2.SchedulerEvents) -> None:
        self._sessions.deliver(events.outputs)
        if events.pong:
            self.pulse.take(events.pong)
        if events.HasField("load"):
            self._take_load(events.load)
        if events.link_news.problem and self._instance.not_ready:
            self._take_problem(events.link_news.problem)
        if events.HasField("kv_events"):
            self._sessions.tell_kv(events.kv_events)
        self._questions.take(events)
        if events.HasField("loras"):
            self._take_loras(events.loras)
        self._note_empty()

    def _take_load(self, load: bootstrap_pb2.WorkerLoad) -> None:
        links_changed = load.linked_instances != self._sessions.load.linked_instances
        self._sessions.set_load(load)
        if links_changed:
            self._take_links(load)
            self._on_news()

    def _take_links(self, load: bootstrap_pb2.WorkerLoad) -> None:
        """The scheduler uses no link below the requirement: the first one makes us ready."""
        if self._instance.not_ready and load.linked_instances:
            self._instance.not_ready = ""
            self._instance.state = bootstrap_pb2.INSTANCE_STATE_READY
            logger.info("%s is ready", self)

    def _take_problem(self, problem: str) -> None:
        logger.warning("%s is not ready: %s", self, problem)
        self._instance.not_ready = problem
        self._on_news()

    def _take_loras(self, loras: engine_pb2.LoraSet) -> None:
        del self._instance.loras[:]
        self._instance.loras.extend(loras.adapters)
        self._on_news()

    def _note_empty(self) -> None:
        if self._sessions.num_open_rooms == 0:
            self._empty.set()

    def _is_peer(self, other: bootstrap_pb2.Instance) -> bool:
        ours = self._instance
        is_loaded = bool(other.compat) and other.state != bootstrap_pb2.INSTANCE_STATE_GONE
        return is_loaded and other.role == _PEER_ROLE[ours.role] and other.compat == ours.compat
