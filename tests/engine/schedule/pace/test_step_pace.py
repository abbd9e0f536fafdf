"""What prompts may cost in a step, by how long the steps before it took."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from diptych.engine.schedule.pace.step_pace import TOGETHER, StepPace
from diptych.engine.schedule.pace.step_times import OUTLIER, StepLine
from diptych.engine.values.prompt_cost import MIN_CHUNK
from diptych.engine.values.request import new_request
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.slo import Slo

LONGEST_S = 0.1
MOST = 8192


@dataclass
class Machine:
    """Reads weights for so long, and computes prompts meanwhile; then so long for each request that decodes."""

    step_s: float
    token_s: float
    row_s: float = 0.0
    pace: StepPace = field(default_factory=lambda: StepPace(LONGEST_S))
    now_s: float = 0.0

    def step(self, num_decoding: int, num_waiting_tokens: int = MOST) -> tuple[int, float]:
        """Run a step as large as it may be; return how many tokens of prompts it had, and how long it took."""
        cost = min(num_waiting_tokens, self.pace.beside(MOST, num_decoding, self.now_s))
        took_s = max(self.step_s, self.token_s * cost) + self.row_s * num_decoding
        self.pace.begin(cost, self.now_s, num_decoding)
        self.now_s += took_s
        self.pace.end(self.now_s)
        return cost, took_s

    def plain_step(self, num_decoding: int) -> None:
        """Run a step while no prompt waits."""
        self.pace.begin(0, self.now_s, num_decoding)
        self.now_s += self.step_s + self.row_s * num_decoding
        self.pace.end(self.now_s)


@pytest.mark.parametrize(("step_s", "token_s", "row_s"), [(0.004, 25e-6, 50e-6), (0.03, 1e-3, 1e-3), (0.0, 1e-6, 0.0)])
def test_steps_that_requests_wait_for_soon_take_no_longer_than_they_may(
    step_s: float, token_s: float, row_s: float
) -> None:
    machine = Machine(step_s, token_s, row_s)
    machine.step(0)
    without_prompts_s = step_s + 20 * row_s
    assert max(machine.step(20)[1] for _ in range(10)) <= LONGEST_S + without_prompts_s
    for _ in range(50):
        cost, took_s = machine.step(20)
        assert took_s <= LONGEST_S * 1.2
        assert cost == MOST or took_s >= LONGEST_S * 0.8, "prompts get the time that there is"


def test_nobody_waits_for_a_step_of_prompts_alone_and_nothing_bounds_it() -> None:
    machine = Machine(0.004, 1e-3)
    assert [machine.step(0)[0] for _ in range(3)] == [MOST] * 3


def test_without_a_bound_prompts_have_all_tokens_of_a_step() -> None:
    machine = Machine(0.004, 1e-3, pace=StepPace(math.inf))
    assert [machine.step(5)[0] for _ in range(3)] == [MOST] * 3


@pytest.mark.parametrize(("num_decoding", "least"), [(1, MIN_CHUNK), (64, 64)])
def test_prompts_go_on_where_output_alone_takes_longer_than_a_step_may(num_decoding: int, least: int) -> None:
    machine = Machine(0.5, 1e-3)
    for _ in range(20):
        machine.step(num_decoding)
    assert {machine.step(num_decoding)[0] for _ in range(20)} == {least}


def test_small_steps_before_a_large_one_slow_it_down_for_a_moment_only() -> None:
    """Each takes as long as reading the weights, which says nothing of a token."""
    machine = Machine(0.004, 25e-6)
    for _ in range(20):
        machine.step(1, num_waiting_tokens=16)
    assert [machine.step(1)[1] >= LONGEST_S * 0.8 for _ in range(6)][-3:] == [True] * 3


@pytest.mark.parametrize("tpot_s", [0.0, 0.5])
@pytest.mark.parametrize(("step_s", "token_s"), [(0.006, 25e-6), (0.012, 3e-6)], ids=["dense", "experts"])
def test_a_short_first_prompt_alone_keeps_none_of_those_beside_outputs_small(
    step_s: float, token_s: float, tpot_s: float
) -> None:
    """Each step takes as long as reading the weights, until prompts have four times as much of it, and again."""
    machine = Machine(step_s, token_s)
    machine.step(0, num_waiting_tokens=10)
    for room in range(8):
        slo = Slo(0.0, tpot_s)
        machine.pace.join(new_request(room, np.zeros(10, np.int64), SamplingParams(max_tokens=900), slo=slo), 0.0)
    machine.plain_step(8)
    costs = [machine.step(8)[0] for _ in range(16)]
    assert min(costs[-3:]) >= min(MOST, 0.8 * LONGEST_S / token_s)


def test_prompts_that_seemed_to_take_no_time_keep_none_small() -> None:
    """By them larger ones take none either; so nothing that reading the weights hides is longer than expected."""
    machine = Machine(0.006, 25e-6)
    machine.plain_step(8)
    for took_s in (0.02, *[0.0] * 12):
        machine.pace.begin(40, machine.now_s, 8)
        machine.now_s += took_s
        machine.pace.end(machine.now_s)
    assert max(machine.step(8)[0] for _ in range(16)) >= 0.8 * LONGEST_S / 25e-6


def test_a_machine_that_becomes_slow_is_noticed_within_a_few_steps() -> None:
    machine = Machine(0.004, 25e-6)
    for _ in range(20):
        machine.step(1)
    machine.token_s *= 10
    assert [machine.step(1)[1] <= LONGEST_S * 1.2 for _ in range(6)][-3:] == [True] * 3


def test_a_step_launched_behind_another_is_timed_from_the_end_of_that() -> None:
    pace = StepPace(LONGEST_S)
    pace.begin(100, 0.0, 1)
    pace.begin(100, 0.0, 1)
    pace.end(0.1)
    pace.end(0.2)
    assert pace.beside(MOST, 1, 0.2) == 100


def test_a_step_that_was_given_up_says_nothing() -> None:
    pace = StepPace(LONGEST_S)
    pace.begin(100, 0.0)
    pace.give_up()
    assert pace.beside(MOST, 1, 0.0) == StepPace(LONGEST_S).beside(MOST, 1, 0.0)


def test_a_small_step_before_any_other_says_little_of_a_large_one() -> None:
    machine = Machine(0.004, 25e-6)
    machine.step(1, num_waiting_tokens=16)
    machine.pace.begin(3500, machine.now_s, 1)
    machine.now_s += 0.004 + 3500 * 25e-6
    machine.pace.end(machine.now_s)
    assert machine.step(1)[1] <= LONGEST_S * 1.2


def test_prompts_whose_steps_get_shorter_as_they_get_larger_cost_something_all_the_same() -> None:
    line = StepLine(origin=1.0)
    for work, seconds in [(3000, 0.12), (4000, 0.08)] * 16:
        line.learn(work, seconds)
    assert 3000 < line.work_in(0.1) < 5000


def machine_that_is_known() -> Machine:
    machine = Machine(0.004, 25e-6)
    for _ in range(20):
        machine.plain_step(1)
        machine.step(1)
    return machine


def test_one_step_like_no_other_changes_nothing_that_is_planned() -> None:
    machine = machine_that_is_known()
    before, machine.step_s = machine.step(1), 0.5
    machine.step(1)
    machine.step_s = 0.004
    assert [machine.step(1)[0] for _ in range(3)] == pytest.approx([before[0]] * 3, rel=0.03)


def test_a_step_whose_end_is_heard_of_late_and_the_short_one_behind_it_tell_what_both_took() -> None:
    machine = machine_that_is_known()
    before = machine.step(1)
    for late_s in (0.08, 0.09, 0.06):
        machine.step_s = 0.004 + late_s
        machine.step(1)
        machine.step_s = 0.004 - late_s
        machine.step(1)
        assert machine.step(1)[0] == pytest.approx(before[0], rel=0.03)
        machine.step_s = 0.004


def test_steps_that_took_no_time_are_forgotten_when_they_take_some() -> None:
    line = StepLine()
    for work in (1000, 2000, 3000, *[1000] * 400):
        line.learn(work, 0.0)
    for _ in range(400):
        line.learn(1000, 0.5)
    assert line.at(1000) == pytest.approx(0.5, rel=0.01)


def known_line() -> StepLine:
    line = StepLine(origin=1.0)
    for work in (1000, 2000, 3000) * 8:
        line.learn(work, 1e-5 * work)
    return line


@pytest.mark.parametrize("seconds", [0.0, 25.0], ids=["none", "a-thousand-times-as-long"])
def test_two_steps_that_seem_to_take_no_time_or_very_long_leave_a_line_from_which_the_next_ones_come_back(
    seconds: float,
) -> None:
    line = known_line()
    for _ in range(2):
        line.learn(2500, seconds)
    assert 0.025 / OUTLIER * 0.99 <= line.at(2500) <= 0.025 * OUTLIER * 1.01
    for _ in range(2):
        line.learn(2500, 0.025)
    assert line.at(2500) == pytest.approx(0.025, rel=0.01)


def test_steps_behind_some_that_took_no_time_are_learned_from_though_these_come_first() -> None:
    line = StepLine(origin=1.0)
    for work, seconds in ((1000, 0.1), (1000, 0.0), (2000, 0.0), (1500, 0.0), *[(1500, 0.05)] * 4):
        line.learn(work, seconds)
    assert line.at(1500) == pytest.approx(0.05, rel=0.1)


def test_prompts_that_come_know_of_each_step_before_them_although_plain_ones_are_learned_together() -> None:
    machine = Machine(0.004, 25e-6)
    for _ in range(20):
        machine.step(1)
        for _ in range(TOGETHER):
            machine.plain_step(1)
    assert machine.step(1)[1] == pytest.approx(LONGEST_S, rel=0.05)
    machine.step_s = 0.08
    for _ in range(3):  # fewer than are learned from at once
        machine.plain_step(1)
    assert machine.step(1)[1] == pytest.approx(LONGEST_S, rel=0.2)


def test_steps_learned_together_tell_nearly_what_they_tell_one_by_one() -> None:
    singly, together = StepLine(), StepLine()
    for number in range(64):
        works = [1000 + 500 * (number % 5) + 10 * each for each in range(8)]
        for work in works:
            singly.learn(work, 0.004 + 1e-6 * work)
        mean = sum(works) / 8
        together.learn(mean, 0.004 + 1e-6 * mean, 8)
    assert together.base_s == pytest.approx(singly.base_s, rel=1e-6)
    assert together.slope_s == pytest.approx(singly.slope_s, rel=1e-6)
    assert together.at(5000) == pytest.approx(0.009, rel=1e-6)
