"""What drafts cost beside the step that has them: a pass in the step behind, and what the host does until that."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

import pytest

from diptych.engine.drafting.budget import share_out
from diptych.engine.drafting.late_costs import NO_PASS, LateCosts
from diptych.engine.drafting.step_costs import FIRST_PERIOD
from diptych.engine.drafting.step_timer import Launched, StepTimer

LATE: Final = LateCosts(lambda: ((6, 0.6e-3), (64, 1.1e-3), (128, 2.0e-3)))  # as measured on an H200, 18 such layers
HOST_S: Final = 0.3e-3  # from the end of a step to the launch of the next one, where none was launched before
NUM_STEPS: Final = 1500


def step(began_s: float, num_drafts: int = 0, num_late: int = 0, num_requests: int = 2) -> Launched:
    return Launched(frozenset(range(num_requests)), num_drafts, False, began_s, 0.0, 0.0, num_late)


class Device:
    """Runs steps in virtual time, which overlap or do not; the one behind drafts begins with what came true."""

    def __init__(self, timer: StepTimer, *, overlaps: bool, host_s: float = HOST_S, passes: LateCosts = LATE) -> None:
        self.timer = timer
        self.now_s = 0.0
        self._overlaps = overlaps
        self._host_s = host_s
        self._passes = passes
        self._end_s = 0.0  # of the step that runs
        self._runs = False

    def run(self, num_requests: int, num_drafts: int, num_late: int, took_s: float) -> None:
        """Launch a step; the host goes on when the one before has run, or this one if nothing may be planned behind."""
        if self._runs:
            self.timer.launched(step(self._end_s - took_s / 10, num_drafts, num_late, num_requests))
            self._wait()
            begins_s = self.now_s
        else:
            begins_s = self.now_s + self._host_s
            self.timer.launched(step(begins_s, num_drafts, num_late, num_requests))
        self._end_s, self._runs = begins_s + took_s + self._passes.at(num_late), True
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
    assert timer.costs.at(8) == pytest.approx(6e-3, rel=0.03)
    assert timer.costs.with_drafts(2, 6, 64) == pytest.approx(6e-3 + hidden_s + LATE.at(64), rel=0.03)


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


def served(load: Load, known: LateCosts, host_s: float = HOST_S) -> Served:
    """Serve in virtual time; the budget believes that passes take what `known` says."""
    timer, rng = StepTimer(known), random.Random(1)
    device, num_late, num_tokens, drafted = Device(timer, overlaps=True, host_s=host_s), 0, 0, []
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


class Stateless(NamedTuple):
    """Many requests of a model without states, whose rows of four drafts come true by 0.8 each; steps take 5 ms."""

    num_requests: int
    asked: float  # how often a request has a guess
    draft_s: float  # that each further token takes, or place of a graph
    host_s: float
    has_graphs: bool = False  # of so many tokens as a multiple of 32

    def extra_s(self, num_drafts: int) -> float:
        """Return what so many drafts take in their step."""
        num_more = -(-num_drafts // 32) * 32 if self.has_graphs else num_drafts
        return num_more * self.draft_s


def served_stateless(load: Stateless) -> tuple[float, float]:
    """Serve in virtual time; return the speed beside steps without drafts, and what one of them is believed to take."""
    timer, rng, num_tokens = StepTimer(), random.Random(1), 0
    device = Device(timer, overlaps=True, host_s=load.host_s, passes=NO_PASS)
    guess = [0.8**place for place in range(1, 5)]
    for _ in range(NUM_STEPS):
        rows = [guess for _ in range(load.num_requests) if rng.random() < load.asked]
        counts = share_out(rows, load.num_requests, timer.costs, 256).counts
        device.run(load.num_requests, sum(counts), 0, 5e-3 + load.extra_s(sum(counts)))
        num_tokens += load.num_requests + sum(came_true(count, 0.8, rng) for count in counts)
    return num_tokens / load.num_requests * 5e-3 / device.now_s, timer.costs.at(load.num_requests)


@pytest.mark.parametrize(
    "load",
    [
        Stateless(128, 0.02, 60e-6, 1e-3, has_graphs=True),
        Stateless(128, 0.02, 20e-6, 1e-3),
        Stateless(64, 0.05, 20e-6, 1e-3),
        Stateless(64, 0.05, 20e-6, 0.3e-3),
    ],
)
def test_few_drafts_of_many_do_not_make_steps_without_them_seem_slow(load: Stateless) -> None:
    """A step with few drafts is of the same size as one without; what the host does behind it is none of that size."""
    speedup, plain_s = served_stateless(load)
    assert speedup > 0.98
    assert plain_s == pytest.approx(5e-3, rel=0.03)


@pytest.mark.parametrize(
    ("load", "least"), [(Stateless(64, 0.3, 5e-6, 0.3e-3), 1.48), (Stateless(16, 0.1, 20e-6, 0.3e-3), 1.13)]
)
def test_drafts_of_many_that_pay_go_on(load: Stateless, least: float) -> None:
    assert served_stateless(load)[0] > least


def came_true(count: int, chance: float, rng: random.Random) -> int:
    return next((place for place in range(count) if rng.random() >= chance), count)


def test_drafts_of_many_whose_pass_does_not_pay_are_left_out_but_for_few_that_are_tried_again() -> None:
    speedup, drafted = served(MANY, LATE)
    assert speedup > 0.98
    assert len([number for number in drafted if number > 50]) < 0.03 * NUM_STEPS


def test_drafts_of_many_are_a_loss_where_the_pass_is_not_counted() -> None:
    """A step with few drafts counts as one of the same size without: so those were learned to be as slow."""
    assert served(MANY, LATE, host_s=0.0).speedup > 0.98
    assert served(MANY, NO_PASS, host_s=0.0).speedup < 0.96


@pytest.mark.parametrize("chance", [0.5, 0.95])
@pytest.mark.parametrize("asked", [0.02, 0.3])
def test_drafts_of_sixteen_are_no_loss(asked: float, chance: float) -> None:
    assert served(SIXTEEN._replace(asked=asked, chance=chance), LATE).speedup > 0.98


def test_drafts_are_tried_at_times_as_if_no_gap_were_behind_them() -> None:
    """Behind one that came to nothing it takes twice as many steps, and no more where drafts follow it."""
    timer = StepTimer()
    device = Device(timer, overlaps=True, host_s=1e-3, passes=NO_PASS)

    def plain_steps_until_a_trial() -> int:
        """Run one step with drafts, and others without as long as the gap is charged."""
        device.run(2, 6, 0, 6e-3)
        for count in range(1000):
            device.run(2, 0, 0, 5e-3)
            if not timer.costs.gap_s:
                return count + 1
            assert timer.costs.gap_s == pytest.approx(1e-3)
        return 0

    for _ in range(8):
        device.run(2, 0, 0, 5e-3)
    assert [plain_steps_until_a_trial() for _ in range(3)] == [FIRST_PERIOD, 2 * FIRST_PERIOD, 4 * FIRST_PERIOD]
    device.run(2, 6, 0, 6e-3)
    assert plain_steps_until_a_trial() == FIRST_PERIOD


def test_drafts_of_one_request_go_on() -> None:
    speedup, drafted = served(ALONE, LATE)
    assert speedup > 1.5
    assert len(drafted) > 0.8 * NUM_STEPS
