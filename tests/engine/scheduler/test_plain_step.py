"""What a step costs that only gives each request its next token: calls, which no other work of a machine changes."""

from __future__ import annotations

import cProfile
import pstats

from scheduler import GREEDY, InstantRunner, Load, one_by_one, serve

MOST_CALLS = 286  # of Python and C functions, in the mean of many steps; at 84deebe there were 278


def num_calls(num_steps: int) -> int:
    profile = cProfile.Profile()
    load = Load(16, num_steps, 4000, GREEDY)  # so that as many requests are told of, whatever the number of steps
    profile.runcall(serve, InstantRunner, one_by_one, load)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined, no-any-return]


def calls_of_a_step() -> float:
    num_calls(20)  # what is made once
    return (num_calls(160) - num_calls(80)) / 80


def test_a_plain_step_of_sixteen_requests_makes_few_calls() -> None:
    assert calls_of_a_step() <= MOST_CALLS
