"""What a pass takes in which the states of recurrent layers see what came true of drafts. Pure.

It is part of the step behind (`late_rows`), and a worker measured it at its start, by how many tokens there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

LateTimes = Sequence[tuple[int, float]]  # tokens, and the seconds of a pass of so many; rising


class LateCosts:
    """The seconds of such passes, on lines between those that were measured."""

    def __init__(self, measured: Callable[[], LateTimes]) -> None:
        """`measured` is asked once, when it is needed: at the start of a worker nothing was measured yet.

        Weights that come later are of the same shape, and take as long.
        """
        self._measured = measured

    @cached_property
    def _times(self) -> LateTimes:
        return self._measured()

    def at(self, num_tokens: float) -> float:
        """Return how long a pass of so many tokens takes; 0 where there is none."""
        if not num_tokens or not self._times:
            return 0.0
        times = self._times
        after = bisect_left(times, (num_tokens, 0.0))
        if after == 0:
            return times[0][1]
        size, seconds = times[after - 1]
        if after == len(times):
            return seconds * num_tokens / size
        next_size, next_s = times[after]
        return seconds + (next_s - seconds) * (num_tokens - size) / (next_size - size)


NO_PASS: Final = LateCosts(lambda: ())
