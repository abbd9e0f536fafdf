"""How a scheduler group comes to hold no request: for a while (`vacate`), or for good (`draining`).

From its first moment on every new leg is refused as handed back, and routers hear of the record at once.

Who leaves for good lets peers have what is cached here (`LastWork`); for that the scheduler counts as one room more.

`OpenWork` is what a group has to end before it holds nothing: the rooms that routers opened, and what the scheduler
keeps of them after their answer (pages that a peer may still write, or has not acknowledged).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from diptych.common.draining import Draining, Work
from diptych.common.errors import Unavailable
from diptych.common.verdicts.drain import Phase
from diptych.engine.frontend.scheduler_client import Commands, PendingQueries
from diptych.engine.frontend.sessions import Sessions
from diptych.v1 import bootstrap_pb2, engine_pb2, worker_pb2

logger = logging.getLogger(__name__)

ASK_AGAIN_S: Final = 0.05  # answered rooms hold pages for a round trip to the peer, seldom longer


class Departure:
    """`draining.run` must be running. `announce` makes the record known.

    `last_work` is what a drain has to end, `work` what `vacate` has. `release_s` is for what can't be handed back.
    """

    def __init__(
        self,
        work: Work,
        last_work: Work,
        sessions: Sessions,
        instance: bootstrap_pb2.Instance,
        announce: Callable[[], None],
        release_s: float,
    ) -> None:
        self.draining = Draining(last_work, self._begin)
        self._work = work
        self._sessions = sessions
        self._instance = instance
        self._announce = announce
        self._release_s = release_s
        self._holds: dict[str, str] = {}

    @property
    def holds(self) -> Mapping[str, str]:
        """Why it takes nothing even after `resume`, in words, by what holds it."""
        return self._holds

    def hold(self, what: str, why: str) -> None:
        """Stay vacated until `let_go`, or for another reason than before. Nothing may run, or `vacate` follows."""
        self._holds[what] = why

    def let_go(self, what: str) -> None:
        """Nothing is held by that any more; `resume` follows."""
        self._holds.pop(what, None)

    async def vacate(self, reason: str, within_s: float) -> None:
        """Refuse every new leg, let what runs finish for so long, and hand back the rest. `resume` in any case.

        Nothing holds KV when it returns. Raises `Unavailable` if it is draining, or something does not let go.
        """
        if self.draining.has_begun:
            raise Unavailable("the worker is draining")
        self._instance.paused, self._sessions.closed_because = True, reason
        self._announce()
        leaving = Draining(self._work)
        leaving.ask(within_s)
        try:
            async with asyncio.timeout(within_s + self._release_s):
                await leaving.run()
        except TimeoutError:
            raise Unavailable("requests that were handed back still hold KV") from None

    def resume(self) -> None:
        """Take legs again after `vacate`, unless it is held, or draining by now."""
        self._instance.paused = bool(self._holds)
        if not self.draining.has_begun:
            self._sessions.closed_because = next(iter(self._holds.values()), "")
        self._announce()

    def progress(self) -> worker_pb2.Drain | None:
        """Return how far the drain is; None while it serves."""
        if not self.draining.has_begun:
            return None
        now = self.draining.progress()
        return worker_pb2.Drain(
            phase=worker_pb2.Drain.PHASE_EMPTY if now.phase is Phase.EMPTY else worker_pb2.Drain.PHASE_DRAINING,
            requests_left=now.requests_left,
            oldest_s=now.oldest_s,
            deadline_s=now.deadline_s,
        )

    def _begin(self) -> None:
        self._instance.state, self._instance.not_ready = bootstrap_pb2.INSTANCE_STATE_DRAINING, ""
        self._sessions.closed_because = "it is draining"
        self._announce()


class OpenWork:
    """Implements `diptych.common.draining.Work` for a scheduler group."""

    def __init__(self, sessions: Sessions, scheduler: Commands, queries: PendingQueries) -> None:
        self._sessions = sessions
        self._scheduler = scheduler
        self._queries = queries

    @property
    def num_left(self) -> int:
        return self._sessions.num_open_rooms

    @property
    def oldest_s(self) -> float:
        return self._sessions.oldest_s

    async def wait_until_none(self) -> None:
        """Raises `SchedulerDied`."""
        await self._sessions.idle.wait()
        status = await self._queries.status()
        try:
            while status.open_rooms:
                await asyncio.sleep(ASK_AGAIN_S)
                status = await self._queries.status()
        except asyncio.CancelledError:
            logger.warning("%d rooms still hold KV after their answer", status.open_rooms)
            raise

    async def hand_back(self) -> None:
        """A prefill worker keeps what it has handed off until decode has acknowledged it."""
        await self._scheduler.send(engine_pb2.SchedulerCommands(hand_back=self._sessions.rooms()))


class LastWork:
    """Implements `diptych.common.draining.Work`: `work`, and beside it to give what is cached to peers."""

    def __init__(self, work: Work, scheduler: Commands, cache_s: float) -> None:
        """`cache_s`: how long that may take at most."""
        self._work = work
        self._scheduler = scheduler
        self._cache_s = cache_s
        self._has_begun = False

    @property
    def num_left(self) -> int:
        return self._work.num_left

    @property
    def oldest_s(self) -> float:
        return self._work.oldest_s

    async def wait_until_none(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._give(self._cache_s)
        await self._work.wait_until_none()

    async def hand_back(self) -> None:
        """Time is up for what is cached, too."""
        self._has_begun = True
        await self._give(0.0)
        await self._work.hand_back()

    async def _give(self, within_s: float) -> None:
        await self._scheduler.send(engine_pb2.SchedulerCommands(give_cache=engine_pb2.GiveCache(within_s=within_s)))
