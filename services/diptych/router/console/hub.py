"""Brings what the console shows to all that look: looks at each topic for all viewers at once, and tells what changed.

Rule: nothing is gathered while nobody looks. The first look starts it, and it ends `LINGER_S` after the last one. A
viewer that takes too little loses its place at once, and its stream ends when it reads on: it may come again and begin
with a snapshot. A topic is looked at as often as what a look costs allows, but at once where something happened that
changes who may serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Set
from typing import Final, Protocol

from diptych.common.errors import Unavailable
from diptych.router.console.feed import PING, StepsFeed, StepsReader

logger = logging.getLogger(__name__)

STEPS: Final = "steps"  # the topic that is only added to
INTERVAL_S: Final = 0.2  # between two looks; longer of a topic that would take more than `MAX_SHARE` of a core
MAX_SHARE: Final = 0.002  # 64 workers with 32 links each: a look at the fleet each three seconds, if nothing happens
SLOWER_S: Final[Mapping[str, float]] = {"cache": 2.0, "charts": 4.0}
FLEET: Final = "fleet"
OTHERS_S: Final = 1.0  # between two questions to other routers
PING_S: Final = 10.0
LINGER_S: Final = 10.0
PAUSE_S: Final = 10.0  # of a topic that can't be looked at: our bug
MAX_VIEWERS: Final = 64
MAX_WAITING_BYTES: Final = 4 << 20  # for one viewer, but the first event may be longer
RETRY_S: Final = 10


class Source(Protocol):
    """Where events of a topic come from."""

    def news(self) -> bytes:
        """Return the event for who has all until the last look; empty if there is none."""
        ...

    def snapshot(self) -> bytes:
        """Return the event for who has nothing: all until the last look."""
        ...


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


class Viewer:
    """Who looks, and what is on the way there."""

    def __init__(self, topics: Collection[str], read_steps: Callable[[], bytes] = lambda: b"") -> None:
        """`read_steps` returns the steps that come next, some at a time; empty: none."""
        self.topics = frozenset(topics)
        self._read_steps = read_steps
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._has_ended = False
        self._news = asyncio.Event()

    def push(self, event: bytes) -> bool:
        """Send an event; return False, and end, if too much waits already."""
        if self._events and self._num_bytes + len(event) > MAX_WAITING_BYTES:
            self._forget()
            self.end()
            return False
        self._events.append(event)
        self._num_bytes += len(event)
        self._news.set()
        return True

    def look_for_steps(self) -> None:
        """There may be new ones."""
        self._news.set()

    def end(self) -> None:
        """Nothing more comes but what is on the way."""
        self._has_ended = True
        self._news.set()

    async def take(self) -> bytes:
        """Return what comes next, as soon as there is something; empty: it has ended."""
        while True:
            await self._news.wait()
            taken = b"".join(self._events)
            self._forget()
            if self._has_ended:
                return taken
            steps = self._read_steps()
            if not steps:
                self._news.clear()
            if taken or steps:
                return taken + steps

    def _forget(self) -> None:
        self._events.clear()
        self._num_bytes = 0


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
        self._sources = sources
        self._steps = steps
        self._gathering = gathering
        self._clock = clock
        self._viewers: dict[Viewer, None] = {}
        self._due_s: dict[str, float] = {}
        self._paused_until_s: dict[str, float] = {}
        self._pinged_s = 0.0
        self._looked_s = 0.0
        self._somebody_looks = asyncio.Event()
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
        for topic in sorted(viewer.topics - {STEPS}):
            self._tell(topic)  # so that what comes next follows this snapshot for all
            viewer.push(self._sources[topic].snapshot())
        self._viewers[viewer] = None
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """A viewer has gone."""
        self._viewers.pop(viewer, None)
        self._looked_s = self._clock()

    def close(self) -> None:
        """End all streams, and begin no other: the router leaves."""
        self._is_closed = True
        for viewer in self._viewers:
            viewer.end()
        self._viewers.clear()

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
            self.tell_all(self._due(self._clock()))
            await asyncio.sleep(INTERVAL_S)
        self._somebody_looks.clear()

    async def _notice_changes(self) -> None:
        while True:
            await self._gathering.wait_for_change()
            self._due_s.pop(FLEET, None)

    def _due(self, now_s: float) -> frozenset[str]:
        """Return the topics that it is time to look at."""
        return frozenset(topic for topic in self.topics if now_s >= self._due_s.get(topic, 0.0))

    def tell_all(self, topics: Set[str]) -> None:
        """Look at these topics, and send what has changed to who follows them."""
        for topic in topics & self.topics - {STEPS}:
            self._tell(topic)
        for viewer in self._viewers:
            if STEPS in viewer.topics:
                viewer.look_for_steps()
        if self._clock() - self._pinged_s >= PING_S:
            self._pinged_s = self._clock()
            self._send(PING, list(self._viewers))

    def _tell(self, topic: str) -> None:
        if self._clock() < self._paused_until_s.get(topic, 0.0):
            return
        begun_s = time.thread_time()
        try:
            event = self._sources[topic].news()
        except Exception:  # our bug, which shall cost no request
            logger.exception("the console can't show %s", topic)
            self._paused_until_s[topic] = self._clock() + PAUSE_S
            return
        pause_s = max(SLOWER_S.get(topic, 0.0), (time.thread_time() - begun_s) / MAX_SHARE)
        self._due_s[topic] = self._clock() + pause_s
        if event:
            self._send(event, [viewer for viewer in self._viewers if topic in viewer.topics])

    def _send(self, event: bytes, viewers: Collection[Viewer]) -> None:
        for viewer in viewers:
            if not viewer.push(event):
                logger.info("dropped a viewer of the console that took too little")
                self._viewers.pop(viewer, None)

    async def _ask_others(self) -> None:
        while True:
            if topics := self.topics:
                try:
                    await self._gathering.ask_others(topics)
                except Exception:
                    logger.exception("the console can't ask other routers")
            await asyncio.sleep(OTHERS_S)
