"""The probes of a worker process: gathers the facts, whatever thread asks, and has `probes` judge them.

`SchedulerLiveness` notices a scheduler that is there but does not answer: its process was stopped, or it hangs. Rule:
its requests are done elsewhere only once a part of it can't answer (a process was stopped, a node is not heard), or it
has been silent for `stall_s`, longer than any step. A step that encodes images beats behind each layer of the tower: it
goes on, though nothing is answered. It is told as silent much earlier (`silence`), so that routers prefer others and
operators see why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from diptych.common.errors import InternalError
from diptych.common.event_loop import LoopHeartbeat
from diptych.common.members.membership_client import MembershipWatcher
from diptych.common.verdicts.probes import Probes
from diptych.engine.frontend import probes as worker_probes
from diptych.engine.frontend.probes import InstanceFacts
from diptych.engine.frontend.scheduler_client import Commands
from diptych.engine.frontend.silence import READY_MARGIN, Silence, silence_words
from diptych.v1 import bootstrap_pb2, engine_pb2

logger = logging.getLogger(__name__)

PING_S: Final = 0.5
STOPPED_S: Final = 1.0  # without an answer, until a scheduler counts as silent of which a part can't answer


class SchedulerSilent(InternalError):
    """The scheduler does not answer. It may again."""


class Beats(Protocol):
    """The heartbeat of its loop."""

    @property
    def last_s(self) -> float | None:
        """When the loop last came round; None: it has not begun."""
        ...


class Scheduler(Commands, Protocol):
    """What is asked whether it lives."""

    def absence(self) -> str:
        """Say which part of it can't answer; empty: it could. Asked where no answer comes."""
        ...

    @property
    def heartbeat(self) -> Beats: ...


class SchedulerLiveness:
    """Pings a scheduler, and looks at the beats of its loop.

    `silence` is done while its requests are done elsewhere, and a new future once it answers. `silent_s` and
    `is_silent` tell of every silence; `on_silence` hears of each look. `unready_s` is for probes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stall_s: float,
        on_silence: Callable[[int], None] = lambda silent_s: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._stall_s = stall_s
        self._on_silence = on_silence
        self._clock = clock
        self._beats = Silence()
        self.silent_s = 0  # whole seconds; 0: it is heard
        self.unready_s = 0  # the same, once that is so long that the worker is not ready
        self.is_silent = asyncio.Event()  # `silent_s` is not 0
        self._asked = self._answered = 0
        self._asked_s = 0.0
        self.silence: asyncio.Future[SchedulerSilent] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(PING_S)

    async def beat(self) -> None:
        """Ask, if the last question was answered; otherwise judge how long that has taken."""
        now_s = self._clock()
        if self._answered == self._asked:
            self._asked, self._asked_s = self._asked + 1, now_s
            await self._scheduler.send(engine_pb2.SchedulerCommands(ping=self._asked))
        elif not self.silence.done() and (reason := self._complaint(now_s - self._heard_s)):
            logger.error("the scheduler does not answer: %s; its requests are done elsewhere", reason)
            self.silence.set_result(SchedulerSilent(f"the scheduler does not answer: {reason}"))
        self._tell(now_s)

    def complaint(self) -> SchedulerSilent:
        """Say how it is silent, while `is_silent`."""
        return SchedulerSilent(silence_words(self.silent_s))

    def on_pong(self, pong: int) -> None:
        """Note an answer."""
        self._answered = pong
        if self.silence.done():
            logger.info("the scheduler answers again")
            self.silence = asyncio.get_running_loop().create_future()

    def _tell(self, now_s: float) -> None:
        """One that was stopped is silent before its beats say so."""
        silent_s = self._beats.look(self._scheduler.heartbeat.last_s, now_s)
        is_unready = silent_s > READY_MARGIN * self._beats.allowed_s or self.silence.done()
        if self.silence.done():
            silent_s = max(silent_s, now_s - self._heard_s)
        self.silent_s = int(silent_s)
        self.unready_s = self.silent_s * is_unready
        if self.silent_s and not self.is_silent.is_set():
            logger.warning("%s: routers prefer other workers", silence_words(self.silent_s))
            self.is_silent.set()
        elif not self.silent_s and self.is_silent.is_set():
            logger.info("the scheduler is heard again")
            self.is_silent.clear()
        self._on_silence(self.silent_s)

    @property
    def _heard_s(self) -> float:
        """Since when it could have answered, or beaten."""
        return max(self._asked_s, self._scheduler.heartbeat.last_s or 0.0)

    def _complaint(self, silent_s: float) -> str:
        if silent_s >= STOPPED_S and (absence := self._scheduler.absence()):
            return absence
        return f"silent for {silent_s:.0f} s" if silent_s >= self._stall_s else ""


class WorkerHealth:
    """`heartbeat` must be running on the frontend's loop."""

    def __init__(
        self,
        instances: Callable[[], Sequence[InstanceFacts]],
        watcher: MembershipWatcher,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        started_s = clock()
        self._watcher = watcher
        self._num_known_routers = 0
        self.heartbeat = LoopHeartbeat(clock)
        self.probes = Probes(
            lambda: worker_probes.live(instances(), self.heartbeat.last_s, clock(), stall_s),
            lambda: worker_probes.ready(instances(), self._num_known_routers),
            lambda: worker_probes.startup(instances(), clock() - started_s),
        )
        watcher.add_listener(self._count_routers)

    def _count_routers(self) -> None:
        """On the loop's thread, to which the membership belongs."""
        members = self._watcher.instances().values()
        self._num_known_routers = sum(
            member.role == bootstrap_pb2.ROLE_ROUTER and member.state == bootstrap_pb2.INSTANCE_STATE_READY
            for member in members
        )
