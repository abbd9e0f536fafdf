"""What runs of the console in one process of a router: a sample each 5 s always, the rest while somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Set
from typing import Any, Protocol

from diptych.router.console.calls.calls import Calls
from diptych.router.console.documents import AllRouters
from diptych.router.console.fleet.watches import Watches
from diptych.router.console.pieces import Pieces
from diptych.router.console.turns import in_turns
from diptych.router.workers.fleet import Fleet


class Looking:
    """Implements `hub.Gathering`: what is done while somebody looks."""

    def __init__(self, watches: Watches, routers: AllRouters, fleet: Fleet) -> None:
        self._fleet = fleet
        self._watches = watches
        self._routers = routers

    def start(self) -> None:
        self._watches.start()

    def stop(self) -> None:
        self._watches.stop()

    async def wait_for_change(self) -> None:
        await self._fleet.wait_for_change()

    async def ask_others(self, topics: Set[str]) -> None:
        await self._routers.keep_following()
        await self._routers.ask_others(topics)


class Sampled(Protocol):
    """What is sampled all the time, as `history.History` is."""

    def sample(self, now_s: float) -> Pieces[None]: ...

    def pause_s(self, now_s: float) -> float: ...


async def keep_sampling(history: Sampled, wall_clock: Callable[[], float] = time.time) -> None:
    """Take the samples of charts, until cancelled: an hour is there when somebody comes."""
    while True:
        await in_turns(history.sample(wall_clock()))
        await asyncio.sleep(history.pause_s(wall_clock()))


class Console:
    """What runs of the console in one process. `run` must be running."""

    def __init__(
        self, calls: Calls, close: Callable[[], None], *parts: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """`close` ends the streams of all viewers."""
        self.calls = calls
        self.close = close
        self._parts = parts

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in self._parts:
                group.create_task(part())
