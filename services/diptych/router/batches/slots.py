"""The places of lines, of all batches of a process: given one after another, in turn, while `idle` says so."""

from __future__ import annotations

import asyncio
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

    def answered(self) -> None:
        """Its prompt is computed, or it is over."""
        if not self._is_answered:
            self._is_answered = True
            self._on_answered()


class Slots:
    """Use it from one event loop."""

    def __init__(self, most: int, busy: Callable[[int], Busy]) -> None:
        """`busy` is told how many lines have no first token."""
        self.most = most
        self._busy = busy
        self._turn = asyncio.Lock()  # first come, first served
        self._changed = asyncio.Event()
        self.num_running = 0
        self._num_prompts = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        """Hold a place, once there is one."""
        async with self._turn:
            while self.num_running >= self.most or not may_begin(self._busy(self._num_prompts)):
                self._changed.clear()
                await self._wait()
            self.num_running += 1
            self._num_prompts += 1
        held = Slot(self._note_answered)
        try:
            yield held
        finally:
            held.answered()
            self.num_running -= 1
            self._changed.set()

    def _note_answered(self) -> None:
        self._num_prompts -= 1
        self._changed.set()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()
        except TimeoutError:
            return
