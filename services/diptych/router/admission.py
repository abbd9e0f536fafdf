"""How many requests the router works on at once. Beyond that it says no at once: a queue here would only hide load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from diptych.common.errors import Overloaded


class Admission:
    """Counts running requests up to a limit."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_running = 0

    @contextmanager
    def admit(self, count: int = 1) -> Iterator[None]:
        """Hold places for `count` requests. Raises `Overloaded` when there are fewer left."""
        if self.num_running + count > self._max_running:
            raise Overloaded(f"the router is busy with {self.num_running} requests of at most {self._max_running}")
        self.num_running += count
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= count
            if self.num_running == 0:
                self._idle.set()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()
