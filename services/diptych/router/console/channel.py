"""Keeps those who follow one topic up to date: looks at it for all of them at once, and sends what has changed.

Rule: a look is done in turns with all that the router serves, so who comes waits until it is over, and then gets a
snapshot of what the others have. A topic is looked at as often as what a look costs allows, but at once where something
happened that changes who may serve.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from diptych.router.console.pieces import Pieces
from diptych.router.console.turns import in_turns, timed_turns
from diptych.router.console.viewer import Viewer

logger = logging.getLogger(__name__)

MAX_SHARE: Final = 0.002  # of a core, for looks at a topic: the fleet of 64 workers about each three seconds
PAUSE_S: Final = 10.0  # of a topic that can't be looked at: our bug


class Source(Protocol):
    """Where events of a topic come from."""

    def news(self) -> Pieces[bytes]:
        """Return the event for who has all until the last look; empty if there is none."""
        ...

    def snapshot(self) -> Pieces[bytes]:
        """Return the event for who has nothing: all until the last look."""
        ...


class Channel:
    """One topic and its viewers. `tell` is called again and again."""

    def __init__(
        self,
        topic: str,
        source: Source,
        drop: Callable[[Viewer], None],
        *,
        slower_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`drop` is told of who took too little; `slower_s`: at least between two looks, where that is longer."""
        self._topic = topic
        self._source = source
        self._drop = drop
        self._slower_s = slower_s
        self._clock = clock
        self._newcomers: list[Viewer] = []
        self._viewers: dict[Viewer, None] = {}  # who have a snapshot
        self._has_changed = False
        self._due_s = -math.inf  # the next look
        self._paused_until_s = -math.inf
        self.took_s = 0.0  # the last look, of processor time

    def join(self, viewer: Viewer) -> None:
        """Send a snapshot when it is told next, and then what changes."""
        self._newcomers.append(viewer)

    def leave(self, viewer: Viewer) -> None:
        """Send nothing more. Idempotent."""
        self._viewers.pop(viewer, None)
        if viewer in self._newcomers:
            self._newcomers.remove(viewer)

    def hurry(self) -> None:
        """Something has changed: look when it is told next."""
        self._has_changed = True

    async def tell(self) -> None:
        """Look if it is time to, and send what has changed; then welcome who came."""
        try:
            if self._is_due():
                await self._look()
            if self._newcomers:
                await self._welcome()
        except Exception:  # our bug, which shall cost no request
            logger.exception("the console can't show %s", self._topic)
            self._paused_until_s = self._due_s = self._clock() + PAUSE_S

    def _is_due(self) -> bool:
        now_s = self._clock()
        if now_s < self._paused_until_s:
            return False
        if not self._viewers:
            return bool(self._newcomers)  # the last look was for others, who have gone
        return self._has_changed or now_s >= self._due_s

    async def _look(self) -> None:
        self._has_changed = False
        begun_s = self._clock()
        event, self.took_s = await timed_turns(self._source.news())
        self._due_s = begun_s + max(self._slower_s, self.took_s / MAX_SHARE)
        if event:
            self._send(event, self._viewers)

    async def _welcome(self) -> None:
        snapshot = await in_turns(self._source.snapshot())
        newcomers, self._newcomers = self._newcomers, []  # those who came meanwhile, too
        self._viewers |= dict.fromkeys(newcomers)
        self._send(snapshot, newcomers)

    def _send(self, event: bytes, viewers: Iterable[Viewer]) -> None:
        for viewer in [*viewers]:
            if not viewer.push(event):
                self._drop(viewer)
