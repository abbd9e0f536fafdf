"""Brings what the console shows to all that look: each topic is looked at for all viewers at once, and told to them.

Rule: nothing is gathered while nobody looks. The first look starts it, and it ends `LINGER_S` after the last one. A
viewer that takes too little loses its place at once, and its stream ends when it reads on: it may come again and begin
with a snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Set
from typing import Final, Protocol

from diptych.common.errors import Unavailable
from diptych.common.event_loop import wait_or_timeout
from diptych.router.console.channel import Channel, Source
from diptych.router.console.feed import PING, StepsFeed, StepsReader
from diptych.router.console.viewer import Viewer

logger = logging.getLogger(__name__)

STEPS: Final = "steps"  # the topic that is only added to
INTERVAL_S: Final = 0.2  # between two words; topics whose looks are dear are looked at less often
SLOWER_S: Final[Mapping[str, float]] = {"cache": 2.0, "charts": 4.0}
STEPS_S: Final = 0.5  # between two words of steps: workers tell of theirs some times in a second, all of them together
FLEET: Final = "fleet"
OTHERS_S: Final = 1.0  # between two questions to other routers
PING_S: Final = 10.0
LINGER_S: Final = 10.0
MAX_VIEWERS: Final = 64
RETRY_S: Final = 10


class Gathering(Protocol):
    """What is done only while somebody looks. `start` and `stop` may be called again."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    async def ask_others(self, topics: Set[str]) -> None:
        """Hear from other routers what belongs to these topics."""
        ...

    async def wait_for_change(self) -> None:
        """Wait until something happens to the fleet."""
        ...


class Hub:
    """The viewers of one process. `run` must be running."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        steps: StepsFeed,
        gathering: Gathering,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sources` are the topics by name, beside that of the steps."""
        self._channels = {
            topic: Channel(topic, source, self._drop, slower_s=SLOWER_S.get(topic, 0.0), clock=clock)
            for topic, source in sources.items()
        }
        self._steps = steps
        self._gathering = gathering
        self._clock = clock
        self._viewers: dict[Viewer, None] = {}
        self._pinged_s = 0.0
        self._steps_due_s = 0.0
        self._looked_s = 0.0
        self._somebody_looks = asyncio.Event()
        self._has_news = asyncio.Event()  # that shall be told at once
        self._is_closed = False

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def topics(self) -> frozenset[str]:
        """What viewers look at."""
        return frozenset().union(*(viewer.topics for viewer in self._viewers))

    def look(self) -> None:
        """Somebody asks once: gather for a while."""
        self._looked_s = self._clock()
        self._somebody_looks.set()

    def join(self, topics: Collection[str]) -> Viewer:
        """Return a viewer, for which snapshots are on the way. Raises `Unavailable`."""
        if self._is_closed:
            raise Unavailable("this router is being drained: ask another one", retry_after_s=RETRY_S)
        if len(self._viewers) >= MAX_VIEWERS:
            raise Unavailable(f"{MAX_VIEWERS} viewers look already: close one", retry_after_s=RETRY_S)
        self.look()
        viewer = Viewer(topics, StepsReader(self._steps)) if STEPS in topics else Viewer(topics)
        viewer.push(PING)
        self._viewers[viewer] = None
        for topic in sorted(viewer.topics - {STEPS}):
            self._channels[topic].join(viewer)
        self._has_news.set()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """A viewer has gone."""
        self._forget(viewer)
        self._looked_s = self._clock()

    def close(self) -> None:
        """End all streams, and begin no other: the router leaves."""
        self._is_closed = True
        for viewer in [*self._viewers]:
            viewer.end()
            self._forget(viewer)

    async def run(self) -> None:
        """Gather and tell while somebody looks, until cancelled."""
        while True:
            await self._somebody_looks.wait()
            self._gathering.start()
            beside = [asyncio.ensure_future(each) for each in (self._ask_others(), self._notice_changes())]
            try:
                await self._tell_while_looked_at()
            finally:
                for each in beside:
                    each.cancel()
                self._gathering.stop()

    async def _tell_while_looked_at(self) -> None:
        while self._viewers or self._clock() - self._looked_s < LINGER_S:
            self._has_news.clear()
            await self._tell()
            await wait_or_timeout(self._has_news, INTERVAL_S)
        self._somebody_looks.clear()

    async def _tell(self) -> None:
        """Tell of all topics. What takes no time goes out together, before looks that are done in turns."""
        if self._clock() >= self._steps_due_s:
            self._steps_due_s = self._clock() + STEPS_S
            self.tell_of_steps()
        for channel in sorted(self._channels.values(), key=lambda channel: channel.took_s):
            await channel.tell()

    async def _notice_changes(self) -> None:
        while True:
            await self._gathering.wait_for_change()
            self._channels[FLEET].hurry()
            self._has_news.set()

    def tell_of_steps(self) -> None:
        """Have viewers look for new steps; and send a word now and then though nothing changes."""
        for viewer in self._viewers:
            if STEPS in viewer.topics:
                viewer.look_for_steps()
        if self._clock() - self._pinged_s >= PING_S:
            self._pinged_s = self._clock()
            for viewer in [*self._viewers]:
                if not viewer.push(PING):
                    self._drop(viewer)

    def _drop(self, viewer: Viewer) -> None:
        logger.info("dropped a viewer of the console that took too little")
        self._forget(viewer)

    def _forget(self, viewer: Viewer) -> None:
        self._viewers.pop(viewer, None)
        for topic in viewer.topics - {STEPS}:
            self._channels[topic].leave(viewer)

    async def _ask_others(self) -> None:
        while True:
            if topics := self.topics:
                try:
                    await self._gathering.ask_others(topics)
                except Exception:
                    logger.exception("the console can't ask other routers")
            await asyncio.sleep(OTHERS_S)
