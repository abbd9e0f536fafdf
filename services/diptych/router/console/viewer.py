"""One who looks at the console, and what is on the way there. Who takes too little loses its place."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

MAX_WAITING_BYTES: Final = 4 << 20  # for one viewer, but the first event may be longer


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

    async def receive(self) -> bytes:
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
