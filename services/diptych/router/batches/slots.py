"""The places of lines, of all batches of a process: given one after another, in turn, while `idle` says so.

Each fleet of workers has a line of its own: who waits for one keeps nobody from another.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from diptych.router.batches.idle import Busy, may_begin

LOOK_S: Final = 0.05  # between two looks at who is busy, while a line waits: workers report each step


class Slot:
    """The place of a line that runs."""

    def __init__(self, on_answered: Callable[[], None]) -> None:
        self._on_answered = on_answered
        self._is_answered = False

    @property
    def is_answered(self) -> bool:
        return self._is_answered

    def answered(self) -> None:
        """Its prompt is computed, or it is over."""
        if not self._is_answered:
            self._is_answered = True
            self._on_answered()


class Slots:
    """Use it from one event loop."""

    def __init__(self, most: int, busy: Callable[[int, int], Busy], fleet_of: Callable[[str], int]) -> None:
        """`fleet_of` tells who would serve a model; `busy` is told of whom, and how many lines have no first token."""
        self.most = most
        self._busy = busy
        self._fleet_of = fleet_of
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)  # by fleet: first come, first served
        self._changed = asyncio.Event()
        self.num_running = 0
        self._num_prompts: Counter[int] = Counter()  # by fleet

    @asynccontextmanager
    async def slot(self, model: str) -> AsyncIterator[Slot]:
        """Hold a place for a line that names a model so, once there is one."""
        fleet = self._fleet_of(model)
        async with self._turns[fleet]:
            while self.num_running >= self.most or not may_begin(self._busy(fleet, self._num_prompts[fleet])):
                self._changed.clear()
                await self._wait()
            self.num_running += 1
            self._num_prompts[fleet] += 1
        held = Slot(lambda: self._note_answered(fleet))
        try:
            yield held
        finally:
            held.answered()
            self.num_running -= 1
            self._changed.set()

    def _note_answered(self, fleet: int) -> None:
        self._num_prompts[fleet] -= 1
        self._changed.set()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()
        except TimeoutError:
            return
