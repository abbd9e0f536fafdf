"""What a step takes by how many tokens it computes for requests that go on, learned from those that ran. Pure.

Only the shape matters: how much longer a step of more tokens is. So what all steps have in common (a machine that slows
down, contexts that grow) is kept apart, as the pace, and follows a few steps; the shape follows many. Nothing is
assumed of it but that more tokens take no less time: on a GPU it has a step where a larger graph begins, on a CPU it
rises. A size that was not measured is taken to cost little, so that it is tried; and one that nobody has used for a
while is tried again, since a bad measurement would else keep it from ever being used: the later, the more often that
brought nothing new.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Final

from diptych.engine.drafting.late_costs import NO_PASS, LateCosts

EXACT: Final = 8  # up to so many tokens each number is a size of its own; beyond, a quarter of an octave is one
PACE_GAIN: Final = 0.2  # of what a step differs from its size's: taken to be true of all steps
SHAPE_GAIN: Final = 0.08  # and of its size alone, at least: as one of all that were measured
OUTLIER: Final = 2.0  # no step counts as more than so many times slower, or faster, than expected
KNOWN: Final = 2  # steps of a size before it is believed: the fastest of them, for what is slow once is no sign
FIRST_PERIOD: Final = 32  # steps without one of a size until it is tried again
LAST_PERIOD: Final = 2048
FIRST_SLOPE: Final = 0.05  # of a step of one token: what a further one adds, before that is measured
HOPE: Final = 0.5  # of what tokens have added so far is what those beyond the largest size are taken to add
REACH: Final = 2  # times the most tokens of a size that is known: what may be tried


@dataclass(slots=True)
class _Size:
    """Steps of about as many tokens."""

    num_tokens: int
    seconds: float  # at pace 1
    num_needed: int = KNOWN  # further steps before it is believed
    num_steps: int = 0
    period: int = FIRST_PERIOD
    due: int = 0  # step at which it is not believed any more

    def learn(self, seconds: float, step: int) -> None:
        """Another step took so long at pace 1. One that is on trial is as fast as the fastest."""
        self.num_steps += 1
        if self.num_needed:
            self.seconds = min(self.seconds, seconds)
            self.num_needed -= 1
        else:
            self.seconds *= (seconds / self.seconds) ** max(SHAPE_GAIN, 1 / self.num_steps)
        self.due = step + self.period

    def doubt(self) -> None:
        self.num_needed, self.num_steps, self.period = 1, 0, min(LAST_PERIOD, 2 * self.period)


class StepCosts:
    """The seconds of steps by their number of tokens."""

    def __init__(self, late: LateCosts = NO_PASS) -> None:
        """`late`: what the step behind takes longer, by what comes true of drafts."""
        self.late = late
        self.gap_s = 0.0  # behind a step with drafts, and no other, until the next one: see `StepTimer`
        self._sizes: list[_Size] = []  # that were measured, rising
        self._believed: list[int] = []  # tokens
        self._curve: list[float] = []  # and their seconds, never falling
        self._slope = 0.0  # of the curve behind its end
        self._pace = 1.0
        self._num_learned = 0

    @property
    def reach(self) -> int:
        """The most tokens that a step may be given to find out what they take."""
        return REACH * self._believed[-1] if self._believed else 0

    def is_known(self, num_tokens: int) -> bool:
        """Whether steps of about so many tokens have been measured often enough to compare others with them."""
        return size_of(num_tokens) in self._believed

    def at(self, num_tokens: int) -> float:
        """Return how long a step of so many tokens takes, roughly; 0 as long as no size is known."""
        sizes, curve = self._believed, self._curve
        after = bisect_right(sizes, num_tokens)
        if after == len(sizes):
            return self._pace * (curve[-1] + self._slope * (num_tokens - sizes[-1])) if sizes else 0.0
        if after == 0:
            return self._pace * curve[0]
        share = (num_tokens - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return self._pace * (curve[after - 1] + share * (curve[after] - curve[after - 1]))

    def with_drafts(self, num_requests: int, num_drafts: int, num_late: float) -> float:
        """Return how long a step with drafts takes, and what is behind it: states see `num_late` tokens late."""
        return self.at(num_requests + num_drafts) + self.gap_s + self.late.at(num_late)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, and of no prompts, took so long."""
        if seconds <= 0:
            return
        self._num_learned += 1
        size, pace = self._size(size_of(num_tokens), seconds), self._pace
        if not size.num_needed:
            ratio = min(OUTLIER, max(1 / OUTLIER, seconds / (pace * size.seconds)))
            seconds = ratio * pace * size.seconds
            self._pace *= ratio**PACE_GAIN
        size.learn(seconds / pace, self._num_learned)
        self._fit()

    def _size(self, num_tokens: int, seconds: float) -> _Size:
        at = bisect_left(self._sizes, num_tokens, key=lambda size: size.num_tokens)
        if at == len(self._sizes) or self._sizes[at].num_tokens != num_tokens:
            self._sizes.insert(at, _Size(num_tokens, seconds / self._pace))
        return self._sizes[at]

    def _fit(self) -> None:
        believed, curve, most = [], [], 0.0
        for size in self._sizes:
            if size.num_needed:
                continue
            if size.due <= self._num_learned:
                size.doubt()
            else:
                most = max(most, size.seconds)
                believed.append(size.num_tokens)
                curve.append(most)
        self._believed, self._curve = believed, curve
        if len(believed) == 1:
            self._slope = FIRST_SLOPE * curve[0] / believed[0]
        elif believed:
            self._slope = HOPE * (curve[-1] - curve[0]) / (believed[-1] - believed[0])


def size_of(num_tokens: int) -> int:
    """Return the size that a number of tokens counts as: no more than it."""
    shift = max(0, num_tokens.bit_length() - 3) if num_tokens > EXACT else 0
    return num_tokens >> shift << shift
