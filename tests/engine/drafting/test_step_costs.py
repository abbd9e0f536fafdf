"""What steps cost by their tokens, as learned from steps."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from diptych.engine.drafting.step_costs import FIRST_PERIOD, KNOWN, StepCosts, size_of


def learned(*steps: tuple[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_tokens, seconds in steps:
        for _ in range(KNOWN):
            costs.learn(num_tokens, seconds)
    return costs


def test_a_size_is_known_once_it_was_measured_a_few_times() -> None:
    costs = StepCosts()
    for _ in range(KNOWN):
        assert not costs.is_known(4)
        costs.learn(4, 0.1)
    assert costs.is_known(4)
    assert not costs.is_known(5)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (8, 8), (9, 8), (10, 10), (17, 16), (63, 56), (100, 96)])
def test_large_numbers_of_tokens_share_a_size(num_tokens: int, size: int) -> None:
    assert size_of(num_tokens) == size


def test_sizes_between_those_measured_lie_on_the_line_between_them() -> None:
    assert learned((2, 0.1), (6, 0.2)).at(4) == pytest.approx(0.15)


def test_more_tokens_never_take_less_time() -> None:
    costs = learned((1, 0.3), (4, 0.1), (8, 0.4))
    assert costs.at(4) == pytest.approx(0.3)
    assert [costs.at(n) for n in range(1, 20)] == sorted(costs.at(n) for n in range(1, 20))


def test_a_step_that_is_slow_once_is_no_sign_of_its_size() -> None:
    costs = StepCosts()
    for seconds in (3.0, 0.1):
        costs.learn(1, seconds)
    assert costs.at(1) == pytest.approx(0.1)


def test_what_slows_all_steps_down_does_not_change_the_shape() -> None:
    costs = learned((1, 0.1), (4, 0.15), (8, 0.2))
    for _ in range(30):
        costs.learn(1, 0.2)
    assert costs.at(1) == pytest.approx(0.2, rel=0.02)
    assert costs.at(8) / costs.at(1) < 2.0
    assert costs.at(8) > 0.25  # though nobody measured it


def test_the_shape_is_found_under_noise() -> None:
    rng, costs = random.Random(1), StepCosts()
    true = {1: 0.070, 2: 0.080, 4: 0.095, 8: 0.115, 16: 0.200}
    for step in range(3000):
        pace = 1.0 if step < 1500 else 1.7
        num_tokens = rng.choice(list(true))
        costs.learn(num_tokens, pace * true[num_tokens] * rng.uniform(0.9, 1.4))
    for num_tokens, seconds in true.items():
        assert costs.at(num_tokens) / costs.at(1) == pytest.approx(seconds / true[1], rel=0.12)


def test_no_more_than_twice_the_tokens_measured_are_tried() -> None:
    assert learned((3, 0.1)).reach == 6


def test_tokens_beyond_those_measured_are_taken_to_cost_little_until_they_are() -> None:
    assert learned((1, 0.1)).at(2) == pytest.approx(0.105)
    assert learned((1, 0.1), (2, 0.101)).at(4) == pytest.approx(0.102)  # half of what those before did
    assert learned((1, 0.1), (2, 0.2)).at(4) == pytest.approx(0.3)


def test_a_size_that_was_not_measured_for_a_while_is_tried_again_each_time_later() -> None:
    costs, tried = learned((1, 0.1), (2, 0.9)), []
    for step in range(1000):
        if costs.at(2) < 0.11:
            tried.append(step)
            costs.learn(2, 0.9)
        costs.learn(1, 0.1)
    assert costs.is_known(1)
    assert len(tried) == 5
    waits = [after - before for before, after in pairwise(tried)]
    assert waits[0] >= 2 * FIRST_PERIOD
    assert all(after > 1.5 * before for before, after in pairwise(waits))


def test_a_size_that_was_slow_by_chance_is_believed_to_be_fast_when_it_is() -> None:
    costs = learned((1, 0.1), (2, 0.9))
    for _ in range(2 * FIRST_PERIOD):
        costs.learn(1, 0.1)
    costs.learn(2, 0.12)
    assert costs.at(2) == pytest.approx(0.12)
