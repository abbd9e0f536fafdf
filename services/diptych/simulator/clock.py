"""Virtual time: what is to happen, in the order of its time, and of its coming where times are equal. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Act = Callable[[], None]


class Clock:
    """Says what time it is, and lets time pass by doing what is due."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Act]] = []
        self._number = 0

    def __call__(self) -> float:
        return self.now_s

    def at(self, when_s: float, act: Act) -> None:
        """Have something done then, or now if that is over; never if it is infinite."""
        if when_s < math.inf:
            self._number += 1
            heapq.heappush(self._due, (max(when_s, self.now_s), self._number, act))

    def after(self, seconds: float, act: Act) -> None:
        self.at(self.now_s + seconds, act)

    def step(self) -> bool:
        """Do what is due next; False if nothing is."""
        if not self._due:
            return False
        self.now_s, _, act = heapq.heappop(self._due)
        act()
        return True
