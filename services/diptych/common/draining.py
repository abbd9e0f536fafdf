"""Performs a drain: waits for open requests, and hands them back when the time is up. `verdicts.drain` decides.

`drain_route` serves drains over HTTP: POST begins, or leaves less time, and answers 202; GET returns the progress. Both
need the token. A POST with `?instance=` answers 404 unless that instance is here: another may have its address by now.

    {"phase": "draining", "instances": {"9f2c...": {"phase": "draining", "requests_left": 3, "oldest_s": 4.2,
     "deadline_s": 25.8}}}

`phase` is that of the instance with most left to do: "empty" means that the process may be ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from starlette.requests import Request
from starlette.routing import Route
from typing_extensions import TypedDict

from diptych.common.errors import NotFound
from diptych.common.event_loop import Stop
from diptych.common.refusals import Refusals
from diptych.common.trust.operator_route import Answer, operator_route, seconds
from diptych.common.trust.trust import Trust
from diptych.common.verdicts.drain import Drain, DrainProgress, Phase

logger = logging.getLogger(__name__)
_ORDER: Final = list(Phase)


class Work(Protocol):
    """What has to end before a process may."""

    @property
    def num_left(self) -> int: ...

    @property
    def oldest_s(self) -> float:
        """How long ago the oldest of it began; 0 when there is none."""
        ...

    async def wait_until_none(self) -> None: ...

    async def hand_back(self) -> None:
        """Have what is left done elsewhere. It may take a moment longer until none is."""
        ...


class Draining:
    """One departure. `run` must be running; `on_begin` is called once, to take nothing new from then on."""

    def __init__(
        self, work: Work, on_begin: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._work = work
        self._on_begin = on_begin
        self._clock = clock
        self._drain = Drain()
        self._news = asyncio.Event()
        self._has_run_out = asyncio.Event()  # nothing runs any more, or it is being handed back
        self.empty = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        return self._drain.phase is not Phase.SERVING

    def ask(self, within_s: float) -> None:
        """Begin, or give what runs less time than before."""
        self._begin()
        self._drain.ask(self._clock() + within_s)
        self._news.set()

    def hurry(self) -> None:
        """Hand back what is left now."""
        self._begin()
        self._drain.hurry(self._clock())
        self._news.set()

    def progress(self) -> DrainProgress:
        return self._drain.progress(self._clock(), self._work.num_left, self._work.oldest_s)

    async def run(self) -> None:
        """Wait until asked; then return when nothing is left."""
        await self._news.wait()
        while self._drain.phase is Phase.DRAINING:
            self._news.clear()
            none_left = await self._wait_until_none_or_due()
            self._drain.look(self._clock(), none_left=none_left)
        self._has_run_out.set()
        if self._drain.phase is Phase.HANDING_BACK:
            logger.warning("no more time for %d open requests", self._work.num_left)
            await self._work.hand_back()
            await self._work.wait_until_none()
            self._drain.look(self._clock(), none_left=True)
        logger.info("empty: nothing is left here")
        self.empty.set()

    async def leave_on(self, stop: Stop, within_s: float, release_s: float | None = None) -> None:
        """Begin when the process is told to stop, hurry when it is told again; return when empty.

        A process that ends need not wait for what nobody can prove to be over: at most `release_s` once it hands back.
        """
        await stop.wait()
        self.ask(within_s)
        hurrying = asyncio.ensure_future(self._hurry_on(stop))
        try:
            await self._has_run_out.wait()
            async with asyncio.timeout(release_s):
                await self.empty.wait()
        except TimeoutError:
            logger.warning("leaving: what was handed back has not let go within %g s", release_s)
        finally:
            hurrying.cancel()
        self._drain.end()

    async def _hurry_on(self, stop: Stop) -> None:
        await stop.hurry.wait()
        self.hurry()

    def _begin(self) -> None:
        if not self.has_begun:
            logger.info("draining: %d requests are open", self._work.num_left)
            self._on_begin()

    async def _wait_until_none_or_due(self) -> bool:
        """Return True when nothing is left; False when the deadline has passed or has moved."""
        none, news = asyncio.ensure_future(self._work.wait_until_none()), asyncio.ensure_future(self._news.wait())
        try:
            left_s = self._drain.deadline_s - self._clock()
            await asyncio.wait((none, news), timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            if none.done():
                none.result()
            return none.done()
        finally:
            none.cancel()
            news.cancel()


class InstanceDrain(TypedDict):
    """How far one instance is."""

    phase: str
    requests_left: int
    oldest_s: float
    deadline_s: float | None


class DrainAnswer(TypedDict):
    """How far all of a process is."""

    phase: str
    instances: dict[str, InstanceDrain]


class Drainable(Protocol):
    """What can be drained."""

    def ask(self, within_s: float | None) -> None:
        """Begin, or leave less time; None: what is configured."""
        ...

    def progress(self) -> Mapping[str, DrainProgress]:
        """Return how far it is, by instance id as hex digits."""
        ...


def drain_route(path: str, drainable: Drainable, trust: Trust, refusals: Refusals) -> Route:
    """Return the path for both methods."""

    async def handle(request: Request) -> Answer:
        if request.method != "POST":
            return 200, progress_body(drainable.progress())
        wanted = request.query_params.get("instance")
        if wanted is not None and wanted not in drainable.progress():
            raise NotFound(f"instance {wanted} is not here")
        drainable.ask(seconds(request, "deadline_s"))
        return 202, progress_body(drainable.progress())

    return operator_route(path, ("GET", "POST"), handle, trust, refusals)


def progress_body(progress: Mapping[str, DrainProgress]) -> DrainAnswer:
    furthest_back = min((each.phase for each in progress.values()), key=_ORDER.index, default=Phase.GONE)
    return {"phase": furthest_back.value, "instances": {name: _fields(each) for name, each in progress.items()}}


def _fields(progress: DrainProgress) -> InstanceDrain:
    return {
        "phase": progress.phase.value,
        "requests_left": progress.requests_left,
        "oldest_s": round(progress.oldest_s, 3),
        "deadline_s": round(progress.deadline_s, 3) if math.isfinite(progress.deadline_s) else None,
    }
