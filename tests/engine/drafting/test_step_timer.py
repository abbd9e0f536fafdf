"""What drafts cost beside the step that has them: a pass in the step behind, and what the host does until that."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

import pytest

from diptych.engine.drafting.budget import share_out
from diptych.engine.drafting.late_costs import NO_PASS, LateCosts
from diptych.engine.drafting.step_timer import Launched, StepTimer

LATE: Final = LateCosts(lambda: ((6, 0.6e-3), (64, 1.1e-3), (128, 2.0e-3)))  # as measured on an H200, 18 such layers
HOST_S: Final = 0.3e-3  # from the end of a step to the launch of the next one, where none was launched before
NUM_STEPS: Final = 1500


def step(began_s: float, num_drafts: int = 0, num_late: int = 0, num_requests: int = 2) -> Launched:
    return Launched(frozenset(range(num_requests)), num_drafts, False, began_s, 0.0, 0.0, num_late)


class Device:
    """Runs steps in virtual time, which overlap or do not; the one behind drafts begins with what came true."""

    def __init__(self, timer: StepTimer, *, overlaps: bool) -> None:
        self.timer = timer
        self.now_s = 0.0
        self._overlaps = overlaps
        self._end_s = 0.0  # of the step that runs
        self._runs = False

    def run(self, num_requests: int, num_drafts: int, num_late: int, took_s: float) -> None:
        """Launch a step; the host goes on when the one before has run, or this one if nothing may be planned behind."""
        if self._runs:
            self.timer.launched(step(self._end_s - took_s / 10, num_drafts, num_late, num_requests))
            self._wait()
            begins_s = self.now_s
        else:
            begins_s = self.now_s + HOST_S
            self.timer.launched(step(begins_s, num_drafts, num_late, num_requests))
        self._end_s, self._runs = begins_s + took_s + LATE.at(num_late), True
        if num_drafts or not self._overlaps:
            self._wait()

    def _wait(self) -> None:
        self.now_s, self._runs = self._end_s, False
        self.timer.committed(self.now_s)


@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapping"])
@pytest.mark.parametrize("pattern", ["PPPPD", "DP", "PPDD", "PPPDDDDDD"])
def test_what_states_see_late_is_not_what_any_step_takes(overlaps: bool, pattern: str) -> None:
    """Steps take 5 ms without drafts, and with some 6."""
    timer = StepTimer(LATE)
    device, num_late = Device(timer, overlaps=overlaps), 0
    for kind in "PPPPPP" + 30 * pattern:
        device.run(2, 6 if kind == "D" else 0, num_late, 6e-3 if kind == "D" else 5e-3)
        num_late = 64 if kind == "D" else 0
    hidden_s = HOST_S if overlaps else 0.0  # behind steps without drafts
    assert timer.costs.at(2) == pytest.approx(5e-3, rel=0.03)
    assert timer.costs.at(8) == pytest.approx(6e-3 + hidden_s, rel=0.03)


class Load(NamedTuple):
    """Requests that have guesses at times, of so many drafts, each of which comes true if the last one did."""

    num_requests: int
    row_drafts: int
    asked: float  # how often a request has a guess
    chance: float  # of a draft
    plain_s: float
    draft_s: float  # that each further token takes, in the step itself


ALONE: Final = Load(1, 8, 0.9, 0.9, 2.3e-3, 0.05e-3)
SIXTEEN: Final = Load(16, 4, 0.05, 0.8, 3.1e-3, 0.024e-3)
MANY: Final = Load(64, 4, 0.05, 0.8, 4.8e-3, 0.022e-3)


class Served(NamedTuple):
    speedup: float  # beside steps without drafts that overlap
    drafted: list[int]  # the steps that had drafts


def served(load: Load, known: LateCosts) -> Served:
    """Serve in virtual time; the budget believes that passes take what `known` says."""
    timer, rng = StepTimer(known), random.Random(1)
    device, num_late, num_tokens, drafted = Device(timer, overlaps=True), 0, 0, []
    guess = [load.chance**place for place in range(1, load.row_drafts + 1)]
    for number in range(NUM_STEPS):
        chances = [guess if rng.random() < load.asked else [] for _ in range(load.num_requests)]
        counts = share_out(chances, load.num_requests, timer.costs, 256).counts
        device.run(load.num_requests, sum(counts), num_late, load.plain_s + load.draft_s * sum(counts))
        came = [came_true(count, load.chance, rng) for count in counts]
        num_late = sum(1 + num for num, count in zip(came, counts, strict=True) if count)
        num_tokens += load.num_requests + sum(came)
        drafted += [number] * any(counts)
    return Served(num_tokens / load.num_requests * load.plain_s / device.now_s, drafted)


def came_true(count: int, chance: float, rng: random.Random) -> int:
    return next((place for place in range(count) if rng.random() >= chance), count)


def test_drafts_of_many_whose_pass_does_not_pay_are_left_out_but_for_few_that_are_tried_again() -> None:
    speedup, drafted = served(MANY, LATE)
    assert speedup > 0.98
    assert len([number for number in drafted if number > 50]) < 0.03 * NUM_STEPS


def test_drafts_of_many_are_a_loss_where_the_pass_is_not_counted() -> None:
    """A step with few drafts counts as one of the same size without: so those were learned to be as slow."""
    assert served(MANY, NO_PASS).speedup < 0.95


@pytest.mark.parametrize("chance", [0.5, 0.95])
@pytest.mark.parametrize("asked", [0.02, 0.3])
def test_drafts_of_sixteen_are_no_loss(asked: float, chance: float) -> None:
    assert served(SIXTEEN._replace(asked=asked, chance=chance), LATE).speedup > 0.98


def test_drafts_of_one_request_go_on() -> None:
    speedup, drafted = served(ALONE, LATE)
    assert speedup > 1.5
    assert len(drafted) > 0.8 * NUM_STEPS
