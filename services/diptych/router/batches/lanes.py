"""The lines of a batch that are in memory, by the model that each names: one model's never keep another's from running.

Rule: a model's lines begin in the order of the file, and so many of them are held at once at most. A line waits for its
model's place, and all that come behind it wait, too, while the model's lines get on: it won't be long. Where they stand
still (its workers are away, or busy with others) the line is passed over, and found again when the file is read anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Final

from diptych.router.batches.slots import Slot

STILL_S: Final = 10.0  # without an answer, or an output that is being made: the lines of a model stand still
REREAD_S: Final = 30.0  # between two readings of a file, at least
MAX_LANES: Final = 8  # names that clients think of: those beyond share one lane


class Lane:
    """The lines that name one model."""

    def __init__(self, now_s: float) -> None:
        self.num_held = 0
        self.moved_s = now_s  # when it got its last answer, or its first line since then
        self.is_passed = False  # some line was passed over, and is to be found again
        self._slots: set[Slot] = set()

    @contextmanager
    def serving(self, slot: Slot) -> Generator[None, None, None]:
        """A line is tried inside."""
        self._slots.add(slot)
        try:
            yield
        finally:
            self._slots.remove(slot)

    def stands_still(self, now_s: float) -> bool:
        return now_s - self.moved_s >= STILL_S and not any(slot.is_answered for slot in self._slots)


class Lanes:
    """Those of one batch. Use it from one event loop."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        """`most`: lines of each lane that are held at once."""
        self._most = most
        self._clock = clock
        self._lanes: dict[str, Lane] = {}
        self._others = Lane(clock())
        self._seen: set[Lane] = set()  # in this reading, with lines that were to begin
        self._is_mixed = True  # the file may have lines of several lanes that are to begin
        self._changed = asyncio.Event()

    def begin_reading(self) -> None:
        """The file is read from its start."""
        self._seen.clear()
        for lane in self._all():
            lane.is_passed = False

    async def end_reading(self) -> bool:
        """Return whether lines were passed over; first wait until one of them could begin."""
        self._is_mixed = len(self._seen) > 1
        passed = [lane for lane in self._all() if lane.is_passed]
        if passed and self._is_mixed:
            await asyncio.sleep(REREAD_S)
        while passed and all(self._is_full(lane) for lane in passed):
            await self._wait()
        return bool(passed)

    def lane(self, model: str) -> Lane:
        """Return the lane of lines that name a model so."""
        if model not in self._lanes and len(self._lanes) < MAX_LANES:
            self._lanes[model] = Lane(self._clock())
        return self._lanes.get(model, self._others)

    async def has_room(self, lane: Lane) -> bool:
        """Return once there is room for a line more; False: it is passed over."""
        self._seen.add(lane)
        while self._is_full(lane):
            if self._is_mixed and lane.stands_still(self._clock()):
                lane.is_passed = True
                return False
            await self._wait()
        return True

    def hold(self, lane: Lane) -> None:
        """A line begins. Where none was held, nothing has stood still."""
        if not lane.num_held:
            lane.moved_s = self._clock()
        lane.num_held += 1

    def release(self, lane: Lane) -> None:
        """A line has ended."""
        lane.num_held -= 1
        lane.moved_s = self._clock()
        self._changed.set()

    def _is_full(self, lane: Lane) -> bool:
        return lane.num_held >= self._most

    def _all(self) -> list[Lane]:
        return [*self._lanes.values(), self._others]

    async def _wait(self) -> None:
        """Wait until a line has ended, or one may stand still meanwhile."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(STILL_S):
                await self._changed.wait()
