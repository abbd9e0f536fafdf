"""What a step takes by how many tokens it computes for requests that go on, learned from those that ran. Pure.

Only the shape matters: how much longer a step of more tokens is. So what all steps have in common (a machine that slows
down, contexts that grow) is kept apart, as the pace, and follows a few steps; the shape follows many. Nothing is
assumed of it but that more tokens take no less time: on a GPU it has a step where a larger graph begins, on a CPU it
rises. A size that was not measured is taken to cost little, so that it is tried; and one that nobody has used for long
is tried again, since one bad measurement would else keep it from ever being used.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

EXACT: Final = 8  # up to so many tokens each number is a size of its own; beyond, a quarter of an octave is one
PACE_GAIN: Final = 0.2  # of what a step differs from its size's: taken to be true of all steps
SHAPE_GAIN: Final = 0.08  # and of its size alone
OUTLIER: Final = 2.0  # no step counts as more than so many times slower, or faster, than expected
KNOWN: Final = 2  # steps of a size before it is believed: the fastest of them, for what is slow once is no sign
FORGETS_EVERY: Final = 1024  # steps: half of how often each size was measured
MOST_COUNTED: Final = 11  # steps of a size: so it is forgotten when it was not measured in two such times
FIRST_SLOPE: Final = 0.05  # of a step of one token: what a further one adds, before that is measured
HOPE: Final = 0.5  # of what tokens have added so far is what those beyond the largest size are taken to add
REACH: Final = 2  # times the most tokens of a size that is known: what may be tried


class StepCosts:
    """The seconds of steps by their number of tokens."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # that were measured, rising
        self._seconds: list[float] = []  # of each, at pace 1
        self._counts: list[int] = []  # of steps
        self._believed: list[int] = []  # sizes
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

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, and of no prompts, took so long."""
        if seconds <= 0:
            return
        at = self._place(size_of(num_tokens), seconds)
        if self._counts[at] < KNOWN:
            self._seconds[at] = min(self._seconds[at], seconds / self._pace)
        else:
            ratio = min(OUTLIER, max(1 / OUTLIER, seconds / (self._pace * self._seconds[at])))
            self._pace *= ratio**PACE_GAIN
            self._seconds[at] *= ratio**SHAPE_GAIN
        self._counts[at] = min(MOST_COUNTED, self._counts[at] + 1)
        self._num_learned += 1
        if self._num_learned % FORGETS_EVERY == 0:
            self._counts = [count // 2 for count in self._counts]
        self._fit()

    def _place(self, size: int, seconds: float) -> int:
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes) or self._sizes[at] != size:
            self._sizes.insert(at, size)
            self._seconds.insert(at, seconds / self._pace)
            self._counts.insert(at, 0)
        return at

    def _fit(self) -> None:
        believed, curve, most = [], [], 0.0
        for size, seconds, count in zip(self._sizes, self._seconds, self._counts, strict=True):
            if count >= KNOWN:
                most = max(most, seconds)
                believed.append(size)
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
