"""What the horizontal pod autoscaler decides: its documented formula, tolerance, stabilisation and rates. Pure.

`desired = ceil(sum / target)` for each metric, the largest of them; no change while the sum is within `tolerance`
of what runs. Down: the highest answer of a window; both ways: no further than the policies allow within their
periods. From the Kubernetes documentation, "Horizontal Pod Autoscaling: algorithm details" and "scaling policies".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SYNC_S: Final = 15.0  # how often it decides


@dataclass(frozen=True, slots=True)
class Behavior:
    """As the chart sets it."""

    up_factor: float = 2.0  # within `up_period_s`; or
    up_pods: int = 2
    up_period_s: float = 30.0
    down_pods: int = 1
    down_period_s: float = 60.0
    down_window_s: float = 300.0
    tolerance: float = 0.1


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric: its sum over the pool, and how much of it a worker should have."""

    total: float
    target: float


class Autoscaler:
    """Sets the size of one pool. Call `decide` every `SYNC_S`."""

    def __init__(self, behavior: Behavior, lowest: int, highest: int) -> None:
        self._behavior = behavior
        self._lowest, self._highest = lowest, highest
        self._answers: deque[tuple[float, int]] = deque()  # of the window
        self._sizes: deque[tuple[float, int]] = deque()  # that it found, and when

    def decide(self, measures: Sequence[Measure], size: int, now_s: float) -> int:
        """Return the size that the pool gets, `size` being what it has."""
        wanted = max(desired(measure, size, self._behavior.tolerance) for measure in measures)
        wanted = self._stable(min(max(wanted, self._lowest), self._highest), size, now_s)
        self._sizes.append((now_s, size))
        return min(max(wanted, self._floor(now_s)), self._ceiling(now_s))

    def _stable(self, wanted: int, size: int, now_s: float) -> int:
        self._answers.append((now_s, wanted))
        while self._answers[0][0] < now_s - self._behavior.down_window_s:
            self._answers.popleft()
        return min(size, max(answer for _, answer in self._answers)) if wanted < size else wanted

    def _ceiling(self, now_s: float) -> int:
        before = min(self._sizes_within(self._behavior.up_period_s, now_s))
        return max(math.ceil(before * self._behavior.up_factor), before + self._behavior.up_pods)

    def _floor(self, now_s: float) -> int:
        return max(self._sizes_within(self._behavior.down_period_s, now_s)) - self._behavior.down_pods

    def _sizes_within(self, period_s: float, now_s: float) -> list[int]:
        """Return the sizes since a period began: rates count from the first."""
        return [each for at_s, each in self._sizes if at_s > now_s - period_s]


def desired(measure: Measure, size: int, tolerance: float) -> int:
    """Return what one metric asks for."""
    ratio = measure.total / (measure.target * size)
    return size if abs(ratio - 1) <= tolerance else math.ceil(measure.total / measure.target)
