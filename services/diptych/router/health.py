"""The probes of a router. What changes is noted on the event loop, so that any thread may ask.

Live: the event loop comes round. Ready: a pair of workers may serve, and the router takes requests. It starts at once:
it loads no weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from diptych.common.heartbeat import LoopHeartbeat
from diptych.common.probes import Probes, Verdict, judge_loops

DRAINING: Final = Verdict(False, "draining")
STALL_S: Final = 30.0  # nothing on the loop takes a fraction of that


class Pairs(Protocol):
    """What readiness depends on."""

    def problem(self) -> str | None:
        """Why no pair may serve; None when one may."""
        ...

    async def wait_for_change(self) -> None: ...


class RouterHealth:
    """`run` must be running."""

    def __init__(self, fleet: Pairs, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock
        self._heartbeat = LoopHeartbeat(clock)
        self._problem: str | None = "it starts"
        self._is_draining = False
        self.probes = Probes(self._live, self._ready, lambda: Verdict(True, "started"))

    async def run(self) -> None:
        """Note what changes, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeat.run())
            while True:
                self._problem = self._fleet.problem()
                await self._fleet.wait_for_change()

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._is_draining = True

    def _live(self) -> Verdict:
        return judge_loops({"the event loop": self._clock() - self._heartbeat.last_s}, STALL_S)

    def _ready(self) -> Verdict:
        if self._is_draining:
            return DRAINING
        return Verdict(self._problem is None, self._problem or "at least one pair of workers is ready")
