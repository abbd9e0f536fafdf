"""Waiting, by formulas of queueing theory. Pure.

Sources: Erlang's C formula by the recursion of its inverse, and the approximation of Allen and Cunneen for services
whose times vary: waits fall off exponentially, and take longer by (1 + cv^2) / 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Wait(NamedTuple):
    """How long who comes waits: nobody with some probability, and the others for exponentially distributed times."""

    probability: float  # of having to wait at all
    mean_s: float  # of those who wait

    def within(self, limit_s: float) -> float:
        """Return the share of those who come that wait for no longer."""
        if limit_s < 0:
            return 0.0
        if math.isinf(self.mean_s):
            return 0.0
        return 1.0 - self.probability * math.exp(-limit_s / self.mean_s) if self.mean_s > 0 else 1.0


FOR_EVER = Wait(1.0, math.inf)


def erlang_c(num_servers: int, offered: float) -> float:
    """Return how likely all servers are busy; `offered` is how many would be, if there were enough."""
    if offered >= num_servers:
        return 1.0
    if offered <= 0:
        return 0.0
    inverse = 1.0
    for number in range(1, num_servers + 1):
        inverse = 1.0 + inverse * number / offered
    blocked = 1.0 / inverse
    return blocked / (1.0 - offered / num_servers * (1.0 - blocked))


def wait(num_servers: int, offered: float, mean_s: float, mean_square: float) -> Wait:
    """Return the wait for servers that take `mean_s` for each, of which the square is `mean_square` in the mean."""
    if offered >= num_servers:
        return FOR_EVER
    if offered <= 0 or mean_s <= 0:
        return Wait(0.0, 0.0)
    variation = max(0.0, mean_square / mean_s**2 - 1.0)
    return Wait(erlang_c(num_servers, offered), mean_s * (1 + variation) / 2 / (num_servers - offered))


def at_most(limit: float, mean: float, variance: float) -> float:
    """Return how likely a count is at most `limit`, by the normal distribution."""
    if variance <= 0:
        return 1.0 if mean <= limit else 0.0
    return 0.5 * (1.0 + math.erf((limit + 0.5 - mean) / math.sqrt(2.0 * variance)))
