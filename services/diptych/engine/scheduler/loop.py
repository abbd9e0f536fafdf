"""The loop of a scheduler process: receive, plan, forward, commit.

Nothing in it waits while there is something to compute; when there is nothing, it sleeps until a command, a transfer
event or the next deadline. What it has to say goes out once an iteration, in one message.

`Inbox` holds what the frontend has said, in its order. It may be looked into while a step runs, which takes nothing
out.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import zmq

from diptych.common.errors import InvalidRequest, NotFound
from diptych.common.garbage import IdleSearches
from diptych.common.logging import set_level
from diptych.common.members.roles import WORKER_ROLES
from diptych.engine.cache.host_tier import NO_COPIER, PageCopier
from diptych.engine.scheduler import codec
from diptych.engine.scheduler.adapters import Adapters
from diptych.engine.scheduler.admin_thread import AdminThread
from diptych.engine.scheduler.grammar_thread import GrammarThread
from diptych.engine.scheduler.lasting import NO_LASTING_TIERS, LastingTiers
from diptych.engine.scheduler.links.links import SUSPECT_CHECK_S, Links
from diptych.engine.scheduler.messages import fields_said
from diptych.engine.scheduler.news import News
from diptych.engine.scheduler.stepping import Stepping, StepWatch
from diptych.engine.scheduler.watching import Watching
from diptych.engine.values.events import (
    AbortRoom,
    CompileGrammar,
    Emit,
    EmitTokens,
    GiveCache,
    HandBack,
    Move,
    PagesRestored,
    ServeRole,
    ToolCalled,
)
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.generation.output import Failure, FailureCode, Output
from diptych.v1 import admin_pb2, bootstrap_pb2, engine_pb2, worker_pb2

logger = logging.getLogger(__name__)

_EVENTS: Final = int(zmq.EVENTS)  # as a plain number it is looked up faster
_POLLIN: Final = int(zmq.POLLIN)
IDLE_S: Final = 0.5  # longest sleep, so that the heartbeat tells an idle loop from one that hangs


@dataclass(frozen=True, slots=True)
class Parts:
    """Those whom a loop has work done by."""

    links: Links
    grammars: GrammarThread
    admin: AdminThread
    adapters: Adapters[Any]
    watch: StepWatch  # over the steps that run in the loop's thread
    copier: PageCopier = NO_COPIER  # of pages from host memory
    lasting: LastingTiers = NO_LASTING_TIERS
    calls: Sequence[int] = ()  # descriptors by which schedulers that share experts call


class SchedulerLoop:
    """Runs one core in one way of stepping, with one command channel and the parts of its process."""

    def __init__(
        self,
        core: SchedulerCore,
        stepping: Stepping,
        channel: zmq.Socket[bytes],
        parts: Parts,
        news: News,
        beat: Callable[[float], None] = lambda now_s: None,
    ) -> None:
        self._core = core
        self._stepping = stepping
        self._channel = channel
        self._inbox = Inbox(channel)
        self._parts = parts
        self._links = parts.links
        self._has_tiers = parts.copier is not NO_COPIER or parts.lasting is not NO_LASTING_TIERS
        self._grammars = parts.grammars
        self._news = news
        self._step_log = stepping.meter.log
        self._watching = Watching(news, self._step_log)
        self._beat = beat  # called with the time whenever the loop comes round
        self._events = engine_pb2.SchedulerEvents()  # goes out at the end of this iteration
        self._stopping = False
        self._poller = zmq.Poller()
        self._poller.register(channel, zmq.POLLIN)
        for part in (parts.links, parts.grammars, parts.admin):
            self._poller.register(part.fileno(), zmq.POLLIN)
        for descriptor in (*parts.copier.descriptors(), *parts.lasting.descriptors(), *parts.calls):
            self._poller.register(descriptor, zmq.POLLIN)
        self._handlers: Mapping[str, Callable[[Any, float], None]] = {  # by field, in the order in which they act
            "role": self._serve,
            "peers": self._set_peers,
            "start": self._start_all,
            "abort": self._abort,
            "hand_back": self._hand_back,
            "tool_called": self._note_tools,
            "give_cache": self._give_cache,
            "weight_givers": lambda givers, now_s: None,  # they were named too late: weights are here
            "status_query": self._answer_status,
            "ping": self._answer_ping,
            "watch_s": self._watch,
            "watcher_came": self._tell_watcher,
            "log_level": self._set_log_level,
            "admin": self._administer,
            "shutdown": self._shut_down,
        }

    def run(self) -> None:
        """Serve until told to shut down."""
        busy, searches = False, IdleSearches()
        self._flush()  # the load of an empty scheduler is news too
        with self._parts.watch.over(self._is_step_wanted):
            while not self._stopping:
                if not busy:
                    searches.search()
                self._receive(0 if busy else self._idle_ms())
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
        now_s = time.monotonic()
        due = [now_s + IDLE_S, self._core.next_deadline_s(), self._links.linking.next_retry_s(), self._watching.next_s]
        if self._core.suspects():
            due.append(now_s + SUSPECT_CHECK_S)
        earliest_s = min(at_s for at_s in due if at_s is not None)
        return max(0, int((earliest_s - now_s) * 1000) + 1)

    def _receive(self, timeout_ms: int) -> None:
        if timeout_ms != 0:
            self._poller.poll(timeout_ms)
        now_s = time.monotonic()
        self._beat(now_s)
        while (commands := self._inbox.pop()) is not None:
            for name, value in fields_said(commands, self._handlers):
                self._handlers[name](value, now_s)
        if answers := self._parts.admin.poll():
            self._events.admin_answers.extend(answers)
        self._links.linking.reconnect(now_s)
        restored = self._restored() if self._has_tiers else ()
        for event in (*self._links.poll(self._core.suspects()), *self._grammars.poll(), *restored):
            self._core.handle(event, now_s)
        self._core.expire(now_s)
        self._perform()

    def _restored(self) -> list[PagesRestored]:
        from_host = [PagesRestored(number, None) for number in self._parts.copier.restored()]
        return [*from_host, *self._parts.lasting.restored()]

    # commands

    def _serve(self, wire: bootstrap_pb2.Role, now_s: float) -> None:
        role = WORKER_ROLES[wire]
        logger.info("serving as %s", role.value)
        self._core.handle(ServeRole(role), now_s)
        self._links.serve(role)

    def _set_peers(self, peers: engine_pb2.PeerView, now_s: float) -> None:
        self._links.linking.set_peers({i.instance_id: i.transfer.engine_metadata for i in peers.instances}, now_s)

    def _start_all(self, legs: Iterable[worker_pb2.StartLeg], now_s: float) -> None:
        for leg in legs:
            self._start(leg, now_s)

    def _abort(self, rooms: Iterable[int], now_s: float) -> None:
        for room in rooms:
            self._grammars.drop(room)
            self._core.handle(AbortRoom(room, "aborted by the router"), now_s)

    def _hand_back(self, rooms: Iterable[int], now_s: float) -> None:
        for room in rooms:
            self._core.handle(HandBack(room), now_s)

    def _note_tools(self, calls: Iterable[worker_pb2.ToolCalled], now_s: float) -> None:
        for call in calls:
            self._core.handle(ToolCalled(call.room, call.tool), now_s)

    def _give_cache(self, wanted: engine_pb2.GiveCache, now_s: float) -> None:
        self._core.handle(GiveCache(wanted.within_s), now_s)

    def _answer_status(self, query: int, now_s: float) -> None:
        self._events.status_answers.append(query)
        self._events.status.CopyFrom(self._news.status())

    def _answer_ping(self, number: int, now_s: float) -> None:
        self._events.pong = number

    def _watch(self, lease_s: float, now_s: float) -> None:
        self._watching.renew(lease_s, now_s)

    def _tell_watcher(self, came: bool, now_s: float) -> None:
        self._watching.tell_all(now_s)

    def _set_log_level(self, level: str, now_s: float) -> None:
        set_level(level)

    def _administer(self, commands: Iterable[admin_pb2.AdminCommand], now_s: float) -> None:
        for command in commands:
            self._parts.admin.submit(command)

    def _shut_down(self, wanted: bool, now_s: float) -> None:
        self._stopping = wanted

    def _start(self, leg: worker_pb2.StartLeg, now_s: float) -> None:
        logger.debug("room %016x starts: request %s", leg.room, leg.request_id)
        if leg.moves_room:
            self._core.handle(Move(leg.room, leg.moves_room, leg.peer_instance_id), now_s)
            return
        try:
            adapter = self._parts.adapters.start(leg.room, leg.lora)
        except NotFound as error:  # another worker may have it
            self._emit(Emit(Output(leg.room, failure=Failure(FailureCode.OVERLOADED, str(error)))))
            return
        try:
            start = codec.start_from_wire(leg, adapter, now_s=now_s, max_tokens=self._core.max_tokens)
        except InvalidRequest as error:
            self._emit(Emit(Output(leg.room, failure=Failure(FailureCode.INVALID, str(error)))))
        else:
            self._core.handle(start, now_s)

    # effects

    def _perform(self) -> None:
        for effect in self._core.pop_effects():
            match effect:
                case EmitTokens():
                    codec.add_tokens_to_wire(effect, self._events)
                case Emit():
                    self._emit(effect)
                case CompileGrammar():
                    self._grammars.submit(effect)
                case _:
                    self._links.posting.perform(effect)

    def _emit(self, effect: Emit) -> None:
        output = effect.output
        if effect.crossing is not None:
            self._step_log.mark(effect.crossing, output.room)
        if output.failure is not None:
            logger.info("room %016x failed: %s", output.room, output.failure.message)
        if output.failure is not None or output.finish is not None:
            self._parts.adapters.end(output.room)
            self._grammars.drop(output.room)
        self._events.outputs.append(codec.output_to_wire(output))

    def _flush(self) -> None:
        self._news.report(self._events)
        if self._step_log.is_on:  # somebody watches
            self._watching.report(self._events, time.monotonic())
        if message := self._events.SerializeToString():
            self._channel.send(message)
            self._events = engine_pb2.SchedulerEvents()


class Inbox:
    """Reads a command channel without waiting. One thread uses it."""

    def __init__(self, channel: zmq.Socket[bytes]) -> None:
        self._channel = channel
        self._commands: deque[engine_pb2.SchedulerCommands] = deque()

    def pop(self) -> engine_pb2.SchedulerCommands | None:
        """Return what was said next; None when that is all."""
        self._read()
        return self._commands.popleft() if self._commands else None

    def aborted(self) -> Set[int]:
        """Return the rooms of which an abort waits to be taken."""
        self._read()
        return {room for commands in self._commands for room in commands.abort}

    def _read(self) -> None:
        while int(self._channel.get(_EVENTS)) & _POLLIN:  # an exception for each time that nothing came costs more
            self._commands.append(engine_pb2.SchedulerCommands.FromString(self._channel.recv(zmq.NOBLOCK)))
