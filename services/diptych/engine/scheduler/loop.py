"""The loop of a scheduler process: receive, plan, forward, commit.

Nothing in it waits while there is something to compute; when there is nothing, it sleeps until a command, a transfer
event or the next deadline. What it has to say goes out once an iteration, in one message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import zmq

from diptych.common.errors import InvalidRequest, NotFound
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.lora.registry import Loaded
from diptych.engine.scheduler import codec
from diptych.engine.scheduler.inbox import Inbox
from diptych.engine.scheduler.links.links import SUSPECT_CHECK_S, Links
from diptych.engine.scheduler.step_watch import StepWatch
from diptych.engine.scheduler.stepping import Stepping
from diptych.engine.values.events import (
    AbortRoom,
    CompileGrammar,
    Emit,
    EmitTokens,
    GrammarFailed,
    GrammarReady,
    HandBack,
    ServeRole,
)
from diptych.engine.values.graph_use import NO_GRAPHS, GraphUse
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.generation.output import Failure, FailureCode, Output
from diptych.v1 import admin_pb2, bootstrap_pb2, engine_pb2, worker_pb2

logger = logging.getLogger(__name__)

IDLE_S: Final = 0.5  # longest sleep, so that the heartbeat tells an idle loop from one that hangs


class Grammars(Protocol):
    """What the loop needs of whoever compiles grammars."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has events."""
        ...

    def submit(self, effect: CompileGrammar) -> None: ...

    def drop(self, room: int) -> None:
        """The room has ended: its grammar, if it waits for one, is not wanted any more."""
        ...

    def poll(self) -> Sequence[GrammarReady | GrammarFailed]: ...


class Admin(Protocol):
    """What the loop needs of whoever executes admin commands."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has something to do."""
        ...

    def submit(self, command: admin_pb2.AdminCommand) -> None: ...

    def poll(self) -> Sequence[admin_pb2.AdminAnswer]: ...


class Adapters(Protocol):
    """What the loop needs of whoever has the adapters."""

    def news(self) -> Sequence[bootstrap_pb2.LoraAdapter] | None:
        """Return all adapters, if they have changed."""
        ...

    def start(self, room: int, name: str) -> Loaded:
        """Return what a request runs with, up to its `end`. Raises `NotFound`."""
        ...

    def end(self, room: int) -> None: ...


class SchedulerLoop:
    """Runs one core in one way of stepping, one command channel and its links."""

    def __init__(
        self,
        core: SchedulerCore,
        stepping: Stepping,
        channel: zmq.Socket[bytes],
        links: Links,
        grammars: Grammars,
        admin: Admin,
        adapters: Adapters,
        *,
        cache: KvCache,
        watch: StepWatch,
        beat: Callable[[float], None] = lambda now_s: None,
        graph_use: Callable[[], GraphUse] = lambda: NO_GRAPHS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._stepping = stepping
        self._channel = channel
        self._inbox = Inbox(channel)
        self._watch = watch  # over the steps of `stepping`, if they run in this thread
        self._links = links
        self._grammars = grammars
        self._admin = admin
        self._adapters = adapters
        self._cache = cache  # the core's; the loop only reports on it
        self._beat = beat  # called with the time whenever the loop comes round
        self._graph_use = graph_use  # asked when somebody wants to know
        self._clock = clock
        self._events = engine_pb2.SchedulerEvents()  # goes out at the end of this iteration
        self._last_load = bootstrap_pb2.WorkerLoad()
        self._last_problem = ""  # of the links
        self._last_max_tokens = core.max_tokens
        self._stopping = False
        self._poller = zmq.Poller()
        self._poller.register(channel, zmq.POLLIN)
        for descriptor in (*links.descriptors(), grammars.fileno(), admin.fileno()):
            self._poller.register(descriptor, zmq.POLLIN)

    def run(self) -> None:
        """Serve until told to shut down."""
        busy = False
        self._flush()  # the load of an empty scheduler is news too
        while not self._stopping:
            self._receive(0 if busy else self._idle_ms())
            with self._watch.over(self._is_step_wanted):
                busy = self._stepping.advance(self._perform)
            self._flush()

    def _is_step_wanted(self) -> bool:
        """Whether somebody still waits for what the running step computes."""
        aborted = self._inbox.aborted()
        return not aborted or not self._core.rooms_of_step() <= aborted

    def _idle_ms(self) -> int:
        """How long nothing can be due, in milliseconds."""
        if self._links.has_events:
            return 0
        now_s = self._clock()
        due = [now_s + IDLE_S, self._core.next_deadline_s(), self._links.next_retry_s()]
        if self._core.suspects():
            due.append(now_s + SUSPECT_CHECK_S)
        earliest_s = min(at_s for at_s in due if at_s is not None)
        return max(0, int((earliest_s - now_s) * 1000) + 1)

    def _receive(self, timeout_ms: int) -> None:
        if timeout_ms != 0:
            self._poller.poll(timeout_ms)
        now_s = self._clock()
        self._beat(now_s)
        while (commands := self._inbox.take()) is not None:
            self._take_commands(commands, now_s)
        self._events.admin_answers.extend(self._admin.poll())
        self._links.reconnect(now_s)
        for event in (*self._links.poll(self._core.suspects()), *self._grammars.poll()):
            self._core.handle(event, now_s)
        self._core.expire(now_s)
        self._perform()

    def _take_commands(self, commands: engine_pb2.SchedulerCommands, now_s: float) -> None:
        if commands.role:
            self._serve(WORKER_ROLES[commands.role], now_s)
        if commands.HasField("peers"):
            members = {i.instance_id: i.transfer.engine_metadata for i in commands.peers.instances}
            self._links.set_peers(members, now_s)
        for leg in commands.start:
            self._start(leg, now_s)
        for room in commands.abort:
            self._grammars.drop(room)
            self._core.handle(AbortRoom(room, "aborted by the router"), now_s)
        for room in commands.hand_back:
            self._core.handle(HandBack(room), now_s)
        if commands.status_query:
            self._events.status_answers.append(commands.status_query)
            self._events.status.CopyFrom(self._status())
        if commands.ping:
            self._events.pong = commands.ping
        for command in commands.admin:
            self._admin.submit(command)
        self._stopping = self._stopping or commands.shutdown

    def _serve(self, role: Role, now_s: float) -> None:
        logger.info("serving as %s", role.value)
        self._core.handle(ServeRole(role), now_s)
        self._links.serve(role)

    def _start(self, leg: worker_pb2.StartLeg, now_s: float) -> None:
        logger.debug("room %016x starts: request %s", leg.room, leg.request_id)
        try:
            adapter = self._adapters.start(leg.room, leg.lora)
        except NotFound as error:  # another worker may have it
            self._emit(Emit(Output(leg.room, failure=Failure(FailureCode.OVERLOADED, str(error)))))
            return
        try:
            start = codec.start_from_wire(leg, adapter, now_s=now_s, max_tokens=self._core.max_tokens)
        except InvalidRequest as error:
            self._emit(Emit(Output(leg.room, failure=Failure(FailureCode.INVALID, str(error)))))
        else:
            self._core.handle(start, now_s)

    def _perform(self) -> None:
        for effect in self._core.take_effects():
            if isinstance(effect, EmitTokens):
                codec.add_tokens_to_wire(effect, self._events)
            elif isinstance(effect, Emit):
                self._emit(effect)
            elif isinstance(effect, CompileGrammar):
                self._grammars.submit(effect)
            else:
                self._links.perform(effect)

    def _emit(self, effect: Emit) -> None:
        output = effect.output
        if output.failure is not None:
            logger.info("room %016x failed: %s", output.room, output.failure.message)
        if output.failure is not None or output.finish is not None:
            self._adapters.end(output.room)
            self._grammars.drop(output.room)
        self._events.outputs.append(codec.output_to_wire(output))

    def _flush(self) -> None:
        load = codec.load_to_wire(self._core.load(), self._links.load)
        if load != self._last_load:
            self._last_load = load
            self._events.load.CopyFrom(load)
        if self._links.problem != self._last_problem:
            self._last_problem = self._links.problem
            self._events.link_news.CopyFrom(engine_pb2.LinkNews(problem=self._last_problem))
        if self._core.max_tokens != self._last_max_tokens:
            self._last_max_tokens = self._events.context_len = self._core.max_tokens
        if not self._cache.changes.is_empty:
            self._events.kv_events.CopyFrom(codec.delta_to_wire(self._cache.changes.take()))
        if (adapters := self._adapters.news()) is not None:
            self._events.loras.CopyFrom(engine_pb2.LoraSet(adapters=adapters))
        if self._events.ByteSize():
            self._channel.send(self._events.SerializeToString())
            self._events = engine_pb2.SchedulerEvents()

    def _status(self) -> worker_pb2.WorkerStatus:
        problems = self._core.check()
        quarantined_since_s = self._core.quarantined_since_s()
        refusals, graphs, meter = self._links.refusals, self._graph_use(), self._stepping.meter
        return worker_pb2.WorkerStatus(
            open_rooms=self._core.num_open_rooms,
            pages_by_state=self._core.page_counts(),
            pages_sent=self._links.num_pages_sent,
            pages_received=self._core.num_pages_received,
            integrity_failures=self._core.num_integrity_failures,
            leaks_found=len(problems),
            problems=problems,
            host_pages=self._cache.tree.num_host_pages,
            host_pages_saved=self._cache.num_saved,
            host_pages_restored=self._cache.num_restored,
            links=self._links.status(),
            link_failures=self._links.num_failures,
            unauthenticated_messages=refusals.num_unauthenticated,
            refused_page_writes=refusals.num_ungranted,
            kv_port_open=refusals.is_open,
            retractions=self._core.num_retracted,
            graphs=graphs.num_graphs,
            graph_bytes=graphs.nbytes,
            prefill_s=meter.total_s,
            prefill_busy=meter.busy(self._clock()),
            prefill_tokens_per_s=meter.tokens_per_s,
            quarantine_oldest_s=0.0 if quarantined_since_s is None else self._clock() - quarantined_since_s,
        )
