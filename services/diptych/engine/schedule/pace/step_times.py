"""How long steps take, learned from those before: one part for requests that get a token, and one for prompts. Pure.

Each part is a line through what was measured, of which the newest counts most: it tells what more work would take. How
fast the machine is at this moment is told by the last few steps, against the line: so a machine that slows down is
noticed soon. Where they clearly differ, all that was measured before is taken to be slower or faster, too.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from diptych.engine.values.request import Request

KEPT: Final = 1 - 1 / 32  # of what was known of a line, when one more step is
PACE_KEPT: Final = 0.75  # and of the last few steps' pace
MIN_SPREAD: Final = 0.05  # of the work, against its mean, for a line to have a slope of its own
ROUNDING: Final = 1e-6
REACH: Final = 4  # times the most work of late that a line is believed to tell of
NEAR: Final = 2  # times as much work, or half: of which a line without a slope of its own tells
CLEAR: Final = 1.3  # times slower or faster than the line: no noise
OUTLIER: Final = 10.0  # steps change a line at once by so many times at most


class _Steps(NamedTuple):
    """Some, one after the other."""

    work: float  # each in the mean
    seconds: float
    number: int

    def and_then(self, others: _Steps) -> _Steps:
        number = self.number + others.number
        work = (self.number * self.work + others.number * others.work) / number
        return _Steps(work, (self.number * self.seconds + others.number * others.seconds) / number, number)


class StepLine:
    """The seconds of steps by their work, for both of which no part is negative.

    Steps that are as large as they may be are all alike, and so a slope of theirs would be one of what else varies: it
    may well be none, and then any work seems to fit. Hence the `origin` of a line: that no work takes no time is known,
    and counts as so many steps, which are never forgotten. Among steps that differ it counts little.

    A step whose end is heard of late seems long, and the one behind it short. So a single one that clearly took another
    time than expected is held until there is one more. If both did alike, the machine has become slower or faster; if
    they did in the mean, the mean counts; else the first one is like no other, and is forgotten. Where that happens
    twice in a row, as where long and short steps alternate, the mean of all four counts after all.
    """

    def __init__(self, origin: float = 0.0) -> None:
        """`origin` 0: steps without work may take any time."""
        self._origin = origin
        self.base_s = 0.0  # of a step without work
        self.slope_s = 0.0  # of each unit of it
        self._has_slope = False  # that was measured
        self._largest = 0.0  # work of late
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._expected = self._measured = 0.0  # of the last few steps: seconds
        self._held: _Steps | None = None  # that took quite another time than expected
        self._doubted: _Steps | None = None  # the last two, if one was forgotten and none was as expected since

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    @property
    def reach(self) -> int:
        """The most work that the line is believed to tell of."""
        return int(REACH * self._largest)

    @property
    def pace(self) -> float:
        """How long the last few steps took, against the line."""
        return self._measured / self._expected if self._expected else 1.0

    def usual(self, work: float) -> float:
        """Return how long a step with so much work takes, as a rule."""
        return self.base_s + self.slope_s * work

    def at(self, work: float) -> float:
        """Return how long a step with so much work takes now."""
        usual_s = self.base_s + self.slope_s * work
        return self._measured / self._expected * usual_s if self._expected else usual_s

    def work_in(self, seconds: float) -> int:
        """Return how much work takes so long now; negative where none does. It is not much more than was measured."""
        pace, most = self.pace, REACH * self._largest
        spare_s, slope_s = seconds - pace * self.base_s, pace * self.slope_s
        return int(min(most, spare_s / slope_s + ROUNDING if slope_s > 0 else math.copysign(most, spare_s)))

    def learn(self, work: float, seconds: float, count: int = 1) -> None:
        """So many steps, one after the other, had so much work and took so long, each in the mean."""
        self._largest = max(work, self._largest * KEPT**count)
        held, self._held = self._held, None
        off = self._off(work, seconds)
        if held is not None:
            self._learn_held(held, _Steps(work, seconds, count), off)
        elif not off:
            self._note(work, seconds, count)
            self._doubted = None
        elif count == 1:
            self._held = _Steps(work, seconds, count)
        else:
            self._rescale(_Steps(work, seconds, count))

    def _learn_held(self, held: _Steps, steps: _Steps, off: int) -> None:
        """Steps are over behind one that took quite another time than expected."""
        both, doubted, self._doubted = held.and_then(steps), self._doubted, None
        if off and off == self._off(held.work, held.seconds):
            self._rescale(both)
        elif not self._off(both.work, both.seconds):
            self._note(*both)
        elif doubted is not None:
            self._note(*doubted.and_then(both))
        else:
            self._doubted = both
            if not off:
                self._note(*steps)  # and nothing is like the one before

    def _off(self, work: float, seconds: float) -> int:
        """Whether steps clearly took longer than expected: 1; less long: -1."""
        usual_s = self.base_s + self.slope_s * work
        if not self._has_slope or usual_s <= 0:
            return 0
        # none is expected where the last few steps took no time
        expected_s = self._measured / self._expected * usual_s if self._expected else usual_s
        return (seconds >= CLEAR * expected_s) - (CLEAR * seconds <= expected_s)

    def _note(self, work: float, seconds: float, count: int) -> None:
        usual_s = self.base_s + self.slope_s * work
        if usual_s > 0 and (self._has_slope or self._is_usual(work)):  # what is known tells how long so much takes
            pace_kept = PACE_KEPT**count
            self._expected = self._expected * pace_kept + usual_s
            self._measured = self._measured * pace_kept + seconds
        kept, weighed = KEPT**count, count * work
        self._weight = self._weight * kept + count
        self._x = self._x * kept + weighed
        self._y = self._y * kept + count * seconds
        self._xx = self._xx * kept + weighed * work
        self._xy = self._xy * kept + weighed * seconds
        self._fit()

    def _rescale(self, steps: _Steps) -> None:
        """The machine has become slower or faster: all steps before would have taken as long as these, now."""
        pace = min(max(steps.seconds / self.usual(steps.work), 1 / OUTLIER), OUTLIER)
        self._y *= pace
        self._xy *= pace
        self._expected = self._measured = 0.0
        self._fit()

    def _fit(self) -> None:
        weight = self._weight + self._origin
        mean, mean_s = self._x / weight, self._y / weight
        variance = self._xx / weight - mean * mean
        if variance > (MIN_SPREAD * mean) ** 2:
            slope_s = max(0.0, (self._xy / weight - mean * mean_s) / variance)
            base_s = mean_s - slope_s * mean
            if base_s < 0 or (self._origin and not slope_s):
                base_s, slope_s = 0.0, self._xy / self._xx
            self.base_s, self.slope_s = base_s, slope_s
            self._has_slope = self._has_slope or not self._origin or self._are_different()
        elif self._has_slope and (usual_s := self.usual(mean)) > 0:
            scale = mean_s / usual_s
            self.base_s, self.slope_s = scale * self.base_s, scale * self.slope_s
        else:
            self.base_s, self.slope_s = 0.0, mean_s / mean if mean else 0.0

    def _is_usual(self, work: float) -> bool:
        """Whether steps before had about so much: then they tell how long this one takes."""
        mean = self._x / self._weight
        return mean <= NEAR * work and work <= NEAR * mean

    def _are_different(self) -> bool:
        """Whether steps with work differ in it."""
        mean = self._x / self._weight
        return self._xx / self._weight - mean * mean > (MIN_SPREAD * mean) ** 2


class ContextCount:
    """How many tokens of context requests have that get one more in each step. A step costs one addition."""

    def __init__(self) -> None:
        self._at_first: dict[int, int] = {}  # tokens at step 0, by room
        self._sum = 0
        self._num_steps = 0

    @property
    def num_tokens(self) -> int:
        return self._sum + len(self._at_first) * self._num_steps

    def add(self, request: Request) -> None:
        at_first = request.num_tokens - self._num_steps
        self._at_first[request.room] = at_first
        self._sum += at_first

    def remove(self, request: Request) -> None:
        """Take out a request, if it is here."""
        self._sum -= self._at_first.pop(request.room, 0)

    def ahead(self, request: Request, num_tokens: int) -> None:
        """A step brought a request, if it is here, so many tokens beside the first."""
        if request.room in self._at_first:
            self._at_first[request.room] += num_tokens
            self._sum += num_tokens

    def stepped(self, num_steps: int) -> None:
        """A step is launched that brings each request a token; -1: it was given up."""
        self._num_steps += num_steps
