"""Lines, curves and means through measurements of which old ones count less. Pure; nothing here knows what they are of.

Rule: no term of a line or a curve is negative. A prior, scaled to the mean of the points, stands in until they show a
slope of their own.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeVar

MEMORY: Final = 64  # measurements that count, about
MIN_POINTS: Final = 4  # for a slope of its own
MIN_SPREAD: Final = 0.1  # likewise: standard deviation of x, against its mean
PACE_MEMORY: Final = 128  # measurements of one worker that count, about
PACE_POINTS: Final = 8  # before it has a pace of its own
CLEAR: Final = 1.4  # times slower or faster than the others: no noise
NEWEST: Final = 16  # of them, that tell of another load
DRIFTED: Final = 1.4  # times more or less than usual: less is no other load
BY_CHANCE: Final = 3.0  # deviations of the mean of the newest
OUTLIER: Final = 3.0  # no measurement counts as slower or faster than this
DOUBLES: Final = (math.inf, 96_000.0, 48_000.0, 24_000.0, 12_000.0, 6_000.0, 3_000.0)  # tokens; see `Curve`
BENT: Final = 0.9  # of a line's error: above it a curve is no better


class Line(NamedTuple):
    """What grows linearly with something."""

    base: float
    slope: float

    def at(self, x: float) -> float:
        return self.base + self.slope * x

    def scaled(self, factor: float) -> Line:
        return Line(self.base * factor, self.slope * factor)


class Curve(NamedTuple):
    """What prompts take to compute: each new token is the dearer the more tokens are before it."""

    base: float
    slope: float  # for a token that is the first
    double: float = math.inf  # tokens before a new one that make it twice as dear
    cost_ratio: float = 1.0  # of a token in the mean, against a first one

    def at(self, num_tokens: float, cached_tokens: float = 0.0) -> float:
        return self.base + self.slope * weight_of(num_tokens, cached_tokens, self.double)

    @property
    def mean_slope(self) -> float:
        """For a token of a usual prompt."""
        return self.slope * self.cost_ratio

    def scaled(self, factor: float) -> Curve:
        return self._replace(base=self.base * factor, slope=self.slope * factor)


S = TypeVar("S", Line, Curve)


def weight_of(num_tokens: float, cached_tokens: float, double: float) -> float:
    """Return how many first tokens would be as dear as these behind the cached ones."""
    return num_tokens * (1 + (cached_tokens + num_tokens / 2) / double)


class Fit:
    """A line through points."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def learn(self, x: float, y: float) -> None:
        keep = 1 - 1 / MEMORY
        self.weight = self.weight * keep + 1
        self._x = self._x * keep + x
        self._y = self._y * keep + y
        self._xx = self._xx * keep + x * x
        self._xy = self._xy * keep + x * y
        self._yy = self._yy * keep + y * y

    @property
    def mean_x(self) -> float:
        return self._x / self.weight

    @property
    def mean_y(self) -> float:
        return self._y / self.weight

    @property
    def slope(self) -> float:
        """As the points show it; 0: they show none."""
        x, y = self._x / self.weight, self._y / self.weight
        variance = self._xx / self.weight - x * x
        has_spread = self.weight >= MIN_POINTS and variance > (MIN_SPREAD * x) ** 2
        return (self._xy / self.weight - x * y) / variance if has_spread else 0.0

    def line(self, prior: Line) -> Line:
        if not self.weight:
            return prior
        x, y, slope = self._x / self.weight, self._y / self.weight, self.slope
        if slope <= 0:
            expected = prior.at(x)
            return prior.scaled(y / expected) if expected else Line(y, 0.0)  # nothing took any time so far
        if slope * x > y:
            return Line(0.0, self._xy / self._xx)
        return Line(y - slope * x, slope)

    def error(self, line: Line) -> float:
        """Return the squared distance of the points from a line."""
        base, slope = line
        squares = self._yy + base * base * self.weight + slope * slope * self._xx
        return squares + 2 * (base * slope * self._x - base * self._y - slope * self._xy)


class CurveFit:
    """A curve through points: under each supposition of how dear context is, a line. The one that fits best."""

    def __init__(self) -> None:
        self._fits = {double: Fit() for double in DOUBLES}

    @property
    def weight(self) -> float:
        return self._fits[math.inf].weight

    @property
    def mean_y(self) -> float:
        return self._fits[math.inf].mean_y

    def learn(self, num_tokens: float, cached_tokens: float, y: float) -> None:
        for double, fit in self._fits.items():
            fit.learn(weight_of(num_tokens, cached_tokens, double), y)

    def curve(self, prior: Curve) -> Curve:
        straight, prior_line = self._fits[math.inf], Line(prior.base, prior.slope)
        if not straight.weight or straight.slope <= 0:
            return Curve(*straight.line(prior_line))
        lines = {double: fit.line(prior_line) for double, fit in self._fits.items()}
        errors = {double: fit.error(lines[double]) for double, fit in self._fits.items()}
        errors[math.inf] *= BENT
        double = min(errors, key=errors.__getitem__)
        return Curve(*lines[double], double, self._fits[double].mean_x / max(1.0, straight.mean_x))


class Ratio:
    """A weighted mean in which old amounts count less."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._keep = 1 - 1 / memory
        self._sum = self._weight = 0.0

    def learn(self, amount: float, weight: float = 1.0) -> None:
        self._sum = self._sum * self._keep + amount
        self._weight = self._weight * self._keep + weight

    def become(self, other: Ratio) -> None:
        """Know what another one does, and nothing else."""
        self._sum, self._weight = other._sum, other._weight

    def value(self, default: float) -> float:
        return self._sum / self._weight if self._weight else default


class Drift:
    """A mean of what came last. What was before is forgotten where the newest clearly differ: it was another load.

    Clearly: in their mean by more than chance makes of as many that differ among themselves as those did.
    """

    def __init__(self) -> None:
        self._usual, self._newest = Ratio(), Ratio(NEWEST)
        self._squares, self._newest_squares = Ratio(), Ratio(NEWEST)

    def learn(self, amount: float, tempered: float) -> None:
        """`tempered`: what it counts as in the long run, where a single one is to say little."""
        self._usual.learn(tempered)
        self._newest.learn(amount)
        self._squares.learn(amount * amount)
        self._newest_squares.learn(amount * amount)
        usual, newest = self._usual.value(0.0), self._newest.value(0.0)
        if (newest > DRIFTED * usual or usual > DRIFTED * newest) and abs(newest - usual) > self._chance(usual):
            self._usual.become(self._newest)
            self._squares.become(self._newest_squares)

    def _chance(self, usual: float) -> float:
        """Return by how much the mean of the newest may differ without saying anything."""
        return BY_CHANCE * math.sqrt(max(0.0, self._squares.value(0.0) - usual * usual) / NEWEST)

    def value(self, default: float) -> float:
        return self._usual.value(default)


class Pace:
    """How long one worker takes, against what was expected of any."""

    def __init__(self) -> None:
        self._ratio = Ratio(PACE_MEMORY)
        self._num_points = 0

    def learn(self, expected_s: float, measured_s: float) -> None:
        self._ratio.learn(min(max(measured_s, expected_s / OUTLIER), expected_s * OUTLIER), expected_s)
        self._num_points += 1

    def scale(self, mean: S, kept: float) -> S:
        """Return the line or curve of this worker, of whose measurements this share has not faded."""
        factor = 1 + kept * (self._ratio.value(1.0) - 1)
        if self._num_points < PACE_POINTS or 1 / CLEAR < factor < CLEAR:
            return mean
        return mean.scaled(factor)
