"""What steps take, from when they are launched and have run: what `StepCosts` learns from. Pure.

No step is planned behind one with drafts before that has run. Where steps without drafts overlap, what the host does
from the one to the other is part of what drafts cost, and of no size: a step with few drafts is of the size of those
without (`size_of`), which would be believed to be slow. What came true of drafts is seen by states in a pass of its
own, in the step behind: how long such a pass takes is known (`LateCosts`), so it is none of what that step takes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Set
from statistics import median
from typing import Final, NamedTuple

from diptych.engine.drafting.late_costs import NO_PASS, LateCosts
from diptych.engine.drafting.step_costs import FIRST_PERIOD, LAST_PERIOD, StepCosts

NUM_GAPS: Final = 8  # the newest ones behind steps with drafts, of which the middle one counts


class Launched(NamedTuple):
    """A step that runs, or has."""

    rooms: Set[int]  # of the requests that it continues
    num_drafts: int
    is_other: bool  # it says nothing of what tokens cost: it has prompts, or a draft model computes it for later drafts
    began_s: float
    asking_s: float  # of the time since then, for all that sources were asked
    passes_s: float  # of that, for passes of a draft model
    num_late: int = 0  # tokens of rows before it that came true: states see them in it


class StepTimer:
    """Hears of the steps in their order."""

    def __init__(self, late: LateCosts = NO_PASS) -> None:
        self.costs = StepCosts(late)
        self._launched: deque[Launched] = deque()
        self._last: Launched | None = None  # that has run
        self._ended_s = -math.inf
        self._gaps_s: deque[float] = deque(maxlen=NUM_GAPS)  # from steps with drafts to the next
        self._overlaps = False  # steps without drafts are launched while others run
        self._num_plain = 0  # steps since one with drafts
        self._period = FIRST_PERIOD  # of them, until drafts are tried as if no gap were behind them

    def launched(self, step: Launched) -> None:
        if self._launched:
            self._overlaps = True
        elif self._last is not None and not step.rooms.isdisjoint(self._last.rooms):
            self._note_gap(self._last, step.began_s + step.asking_s - step.passes_s - self._ended_s)
        self._note_trial(bool(step.num_drafts))
        self._launched.append(step)
        is_charged = self._overlaps and self._gaps_s and self._num_plain < self._period
        self.costs.gap_s = median(self._gaps_s) if is_charged else 0.0

    def _note_trial(self, has_drafts: bool) -> None:
        """Try drafts that do not pay for the gap: behind a step with drafts others may, which guess one token less."""
        if not has_drafts:
            self._num_plain += 1
            return
        if self._num_plain >= self._period:
            self._period = min(LAST_PERIOD, 2 * self._period)
        elif not self._num_plain:
            self._period = FIRST_PERIOD
        self._num_plain = 0

    def _note_gap(self, last: Launched, gap_s: float) -> None:
        """Nothing ran from the end of a step until the next one for the same requests.

        Steps without drafts that overlap take no less than the host does: a longer gap is no work of it.
        """
        if last.num_drafts:
            self._gaps_s.append(min(gap_s, self.costs.at(len(last.rooms))))
        else:
            self._overlaps = False

    def committed(self, now_s: float) -> float:
        """The oldest step has run; return how much longer it took for its drafts, and for late ones, in seconds."""
        step = self._last = self._launched.popleft()
        is_behind = self._ended_s > step.began_s  # another step, which ran meanwhile
        took_s = now_s - (self._ended_s if is_behind else step.began_s + step.asking_s)
        self._ended_s = now_s
        num_requests, longer_s, late_s = len(step.rooms), 0.0, self.costs.late.at(step.num_late)
        took_s -= late_s
        if step.num_drafts:
            with_drafts_s = self.costs.at(num_requests + step.num_drafts) if step.is_other else took_s
            longer_s = max(0.0, with_drafts_s + self.costs.gap_s - self.costs.at(num_requests))
        elif self._overlaps and not is_behind:  # its launch took time that mostly is hidden
            return late_s
        if num_requests and not step.is_other:
            self.costs.learn(num_requests + step.num_drafts, took_s)
        return longer_s + late_s

    def given_up(self) -> None:
        """The step launched last was not run to its end."""
        self._launched.pop()
