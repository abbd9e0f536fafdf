"""When calls come: at a mean rate, evenly by chance or in bursts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from diptych.common.arrays import F64


class Bursts(NamedTuple):
    """A Markov-modulated Poisson process of two states: calm, and a burst."""

    times_busier: float = 8.0  # the rate of a burst by that of the calm
    burst_s: float = 10.0  # in the mean, exponentially distributed
    calm_s: float = 90.0

    @property
    def calm_rate(self) -> float:
        """Calls a second while it is calm, where one a second comes in the mean."""
        whole_s = self.burst_s + self.calm_s
        return whole_s / (self.calm_s + self.times_busier * self.burst_s)


def poisson(rng: np.random.Generator, num: int, rate: float) -> F64:
    """Return so many times in order, `rate` a second."""
    return np.cumsum(rng.exponential(1 / rate, num))


def in_bursts(rng: np.random.Generator, num: int, rate: float, bursts: Bursts) -> F64:
    """Return so many times in order, `rate` a second in the mean over many bursts. They begin in the calm."""
    due = np.cumsum(rng.exponential(1.0, num))  # on a clock that runs as fast as calls come
    calm_rate = rate * bursts.calm_rate
    per_cycle = calm_rate * (bursts.calm_s + bursts.times_busier * bursts.burst_s)
    ends_s, ends_due = np.zeros(1), np.zeros(1)
    while ends_due[-1] < due[-1]:
        cycles = 2 + int(1.2 * (due[-1] - ends_due[-1]) / per_cycle)
        states_s = rng.exponential(np.tile([bursts.calm_s, bursts.burst_s], cycles))
        rates = np.tile([calm_rate, calm_rate * bursts.times_busier], cycles)
        ends_s = np.concatenate([ends_s, ends_s[-1] + np.cumsum(states_s)])
        ends_due = np.concatenate([ends_due, ends_due[-1] + np.cumsum(states_s * rates)])
    return np.interp(due, ends_due, ends_s)
