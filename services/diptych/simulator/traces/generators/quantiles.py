"""Draws numbers whose 50th, 90th and 99th percentiles are those that were published."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from diptych.common.arrays import F64, I64

_NORMAL: Final = (0.0, 1.281552, 2.326348)  # the standard normal distribution's percentiles 50, 90 and 99


class Quantiles(NamedTuple):
    """A distribution: log-normal from percentile to percentile, and below the first as far as to the second.

    What would be beyond `most` is `most`: nobody publishes what is behind the 99th percentile.
    """

    p50: float
    p90: float
    p99: float
    least: float = 1.0
    most: float = math.inf

    def draw(self, rng: np.random.Generator, num: int) -> F64:
        normal = rng.standard_normal(num)
        logs = np.log([self.p50, self.p90, self.p99])
        slopes = np.diff(logs) / np.diff(_NORMAL)
        below = logs[0] + slopes[0] * normal
        drawn = np.where(normal < _NORMAL[1], below, logs[1] + slopes[1] * (normal - _NORMAL[1]))
        found: F64 = np.clip(np.exp(drawn), self.least, self.most)
        return found

    def draw_whole(self, rng: np.random.Generator, num: int) -> I64:
        """Return numbers of things."""
        return np.rint(self.draw(rng, num)).astype(np.int64)
