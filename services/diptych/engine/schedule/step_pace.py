"""How much of prompts a step computes beside requests that decode, so that these wait for a bounded time. Pure.

A step that has both is to take so long at most. What prompts may cost in it follows from what the steps before it took,
all in all: what they did for requests that decode is not told apart, so a large batch leaves less for prompts. But they
go on: they always get `MIN_CHUNK` tokens, and as many as there are requests that decode, of which each costs no less.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from diptych.engine.values.prompt_cost import MIN_CHUNK

KEPT: Final = 0.25  # of what was known, when one more step is: a few steps tell how fast the machine is now


class StepPace:
    """Tell it when steps begin and end, in their order."""

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: of a step that computes prompts and continues requests; infinite: no bound."""
        self._longest_s = longest_s
        self._running: deque[tuple[int, float]] = deque()  # steps: what their prompts cost, when they were launched
        self._ended_s = -math.inf  # the last step
        self._cost = self._seconds = 0.0  # of late, in steps with prompts

    def budget(self, most: int, num_decoding: int) -> int:
        """Return what prompts may cost in a step that so many requests wait for; `most` at most."""
        if not num_decoding or not self._seconds:
            return most
        return int(min(most, max(MIN_CHUNK, num_decoding, self._longest_s * self._cost / self._seconds)))

    def begin(self, cost: int, now_s: float) -> None:
        """A step is launched whose prompts cost so much."""
        self._running.append((cost, now_s))

    def end(self, now_s: float) -> None:
        """The oldest step that runs is complete."""
        cost, began_s = self._running.popleft()
        took_s = now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        if cost and self._longest_s < math.inf:
            self._cost = self._cost * KEPT + cost
            self._seconds = self._seconds * KEPT + took_s

    def give_up(self) -> None:
        """The only step that runs will never be complete: its time says nothing."""
        self._running.popleft()
