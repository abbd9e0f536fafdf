"""Steps that run: one, or a stretch of plain ones, of which the core is told when somebody wants to know. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from diptych.simulator.outcome import F64


class Launched(NamedTuple):
    """A step that is computed, or about to be."""

    num_samples: int
    ends_s: float


class Stretch:
    """Plain steps that run one after the other: nothing needs to be decided before the last has ended."""

    def __init__(self, began_s: float, ends_s: F64, rooms: Sequence[int]) -> None:
        self.ends_s = ends_s  # of each step
        self.rooms = rooms  # that they continue
        self.num_passed = 0  # steps that the core has been told of
        self._told_s = began_s  # when the last of those had ended

    @property
    def end_s(self) -> float:
        return float(self.ends_s[-1])

    def cut(self, now_s: float) -> bool:
        """End with the step that runs now; return whether that is another one than before."""
        num_steps = max(self.num_passed, int(self.ends_s.searchsorted(now_s))) + 1
        if num_steps >= len(self.ends_s):
            return False
        self.ends_s = self.ends_s[:num_steps]
        return True

    def num_over(self, now_s: float) -> int:
        """Return how many steps are over that the core has not been told of."""
        return int(self.ends_s.searchsorted(now_s, side="right")) - self.num_passed

    def pop(self, count: int) -> tuple[float, Sequence[float]]:
        """Return when the next steps began, and when each of so many ended; the core is told of these."""
        began_s, first = self._told_s, self.num_passed
        self.num_passed += count
        ends_s: list[float] = self.ends_s[first : self.num_passed].tolist()
        self._told_s = ends_s[-1]
        return began_s, ends_s
