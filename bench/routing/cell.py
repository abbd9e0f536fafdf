"""The goodput of `pair_cost` and of all others under one pair of objectives, in one or several drawings.

A policy is compared by the means over its drawings, with the other that has most in the mean. The *floor* is what this
other one differs from itself, or from the best of all others in another drawing: less can't be asked of any policy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

MIN_GOODPUT: Final = 0.02  # where no policy has more, a cell compares nothing
GOAL: Final = 0.99  # of the best other's goodput
# The 95th percentile of Student's t, by the number of drawings.
STUDENT: Final = (math.inf, math.inf, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
MAX_DRAWINGS: Final = len(STUDENT) - 1

Goodputs: TypeAlias = Sequence[float]  # by drawing


class Cell(NamedTuple):
    """One member under one pair of objectives."""

    own: Goodputs
    others: Mapping[str, Goodputs]  # by policy

    @property
    def best(self) -> Goodputs:
        """Those of the best other."""
        return max(self.others.values(), key=_mean)

    @property
    def compares(self) -> bool:
        return _mean(self.best) >= MIN_GOODPUT

    @property
    def ratio(self) -> float:
        return _mean(self.own) / _mean(self.best) if self.compares else 1.0

    @property
    def error(self) -> float:
        """Return how far the ratio may be off to either side, with 5 % of doubt at each; 0 with one drawing."""
        if not self.compares or len(self.own) < 2:
            return 0.0
        lacking = GOAL * np.array(self.best) - np.array(self.own)
        deviation = float(lacking.std(ddof=1)) / math.sqrt(len(lacking))
        return STUDENT[len(lacking)] * deviation / _mean(self.best)

    @property
    def is_lost(self) -> bool:
        """Whether it is below the goal, beyond chance."""
        return self.ratio + self.error < GOAL

    @property
    def spread(self) -> float:
        """Return by how much the best other's goodput differs from drawing to drawing, as a share of its mean."""
        return (max(self.best) - min(self.best)) / _mean(self.best) if self.compares else 0.0

    @property
    def self_failures(self) -> float:
        """Return in what share of its drawings the best other is below the goal of itself in the best of the rest."""
        best = self.best
        rest = [max(most for j, most in enumerate(best) if j != i) for i in range(len(best))] if len(best) > 1 else []
        return self._share_below(zip(best, rest, strict=False))

    @property
    def floor_failures(self) -> float:
        """Return how often it is below the goal of whoever is best of all others in another drawing."""
        most = [max(goodputs) for goodputs in zip(*self.others.values(), strict=True)]
        pairs = itertools.permutations(range(len(most)), 2)
        return self._share_below((self.best[i], most[j]) for i, j in pairs)

    def misses(self, name: str) -> bool:
        """Whether one of the others is below the goal."""
        return self.compares and _mean(self.others[name]) < GOAL * _mean(self.best)

    def _share_below(self, pairs: Iterable[tuple[float, float]]) -> float:
        below = [float(one < GOAL * other) for one, other in pairs]
        return _mean(below) if below and self.compares else 0.0


def _mean(values: Goodputs) -> float:
    return sum(values) / len(values)
