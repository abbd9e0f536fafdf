from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from flat_request import flat_request

from diptych.engine.schedule.policies import (
    AGING_S,
    AHEAD_S,
    PATIENCE_S,
    POLICIES,
    FirstCome,
    InTime,
    LongestPrefixMatch,
)
from diptych.engine.values.policy_names import SchedulePolicy
from diptych.engine.values.request import Request
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.slo import Slo


def request(
    room: int, arrival_s: float = 0.0, priority: int = 0, deadline_s: float | None = None, length: int = 4
) -> Request:
    params = SamplingParams(max_tokens=4)
    return flat_request(room, np.arange(length), params, arrival_s=arrival_s, priority=priority, deadline_s=deadline_s)


def order(name: str, requests: list[Request]) -> list[int]:
    """Rooms as the policy ranks them."""
    policy = POLICIES[name](lambda request: 0)
    return [made.room for made in sorted(requests, key=policy.rank)]


def test_first_come_is_first_served() -> None:
    assert order("fcfs", [request(1, 2.0, priority=9), request(2, 1.0, deadline_s=99.0)]) == [2, 1]


def test_higher_priority_goes_first() -> None:
    assert order("priority", [request(1, 0.0), request(2, 1.0, priority=1), request(3, 1.0, priority=-1)]) == [2, 1, 3]


def test_waiting_makes_up_for_priority() -> None:
    late = AGING_S * 3
    assert order("priority", [request(1, late + 1, priority=3), request(2, 0.0)]) == [2, 1]
    assert order("priority", [request(1, late - 1, priority=3), request(2, 0.0)]) == [1, 2]


def test_the_earliest_deadline_goes_first_and_none_is_a_late_one() -> None:
    requests = [request(1, 0.0), request(2, 5.0, deadline_s=30.0), request(3, 6.0, deadline_s=20.0)]
    assert order("deadline", requests) == [3, 2, 1]
    assert order("deadline", [request(1, 0.0), request(2, 5.0, deadline_s=5000.0)]) == [1, 2]


def test_the_longest_cached_prefix_goes_first_while_nobody_has_waited_long() -> None:
    policy = LongestPrefixMatch(lambda request: {1: 0, 2: 32, 3: 16, 4: 32}[request.room])
    line = [request(room, arrival_s=float(room) / 10) for room in (1, 2, 3, 4)]
    assert policy.choose(line, now_s=1.0).room == 2
    assert policy.choose(line, now_s=0.1 + PATIENCE_S).room == 1


def test_the_option_names_every_policy() -> None:
    assert get_args(SchedulePolicy) == tuple(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_one_of_the_line(name: str) -> None:
    line = [request(1), request(2)]
    assert POLICIES[name](lambda request: 0).choose(line, 0.0) in line


def test_who_is_late_already_lets_those_pass_who_may_still_be_in_time_but_not_for_ever() -> None:
    policy = InTime(POLICIES["fcfs"](lambda request: 0))
    line = [request(1, 0.0), request(2, 0.1), request(3, 0.2)]
    for each in line:
        each.slo = Slo(0.5, 0.0)
    assert [policy.choose(line, now_s).room for now_s in (0.4, 0.55, 0.65, 0.75, 0.6 + PATIENCE_S)] == [1, 2, 3, 1, 1]
    line[0].slo = Slo()
    assert policy.choose(line, 0.65).room == 1, "who wants nothing is never late"


def test_who_has_no_time_to_keep_does_not_pass_who_is_late() -> None:
    chat, batch = request(1, 0.0), request(2, 0.1)
    chat.slo = Slo(0.3)
    assert InTime(POLICIES["fcfs"](lambda _: 0)).choose([chat, batch], 0.31) is chat


def test_who_goes_on_with_a_job_comes_before_those_that_came_since_it_began() -> None:
    back, new = request(1, 10.0), request(2, 5.0)
    back.job_s = 8.0
    assert order("fcfs", [new, back]) == [1, 2]
    back.job_s = 4.0
    assert order("fcfs", [new, back]) == [2, 1]


def test_of_jobs_that_go_on_one_goes_first_whose_text_is_cached_while_it_is() -> None:
    cached = {1: 0, 2: 60, 3: 80, 4: 40, 5: 100}
    policy = FirstCome(lambda request: cached[request.room])
    line = [request(room, float(room), length=100) for room in cached]
    assert policy.choose(line, 9.0).room == 1, "none of them is a job that goes on"
    for each in line[1:4]:
        each.job_s = 1.0
    assert policy.choose(line, 9.0).room == 3
    cached[2] = cached[3] = 50
    assert policy.choose(line, 9.0).room == 1, "half of their texts is gone"
    assert policy.choose(line[1:2], 9.0).room == 2


def test_no_job_passes_who_may_still_have_its_first_token_in_time() -> None:
    policy = InTime(FirstCome(lambda request: 3))
    first, chat, job = (request(room, room / 10) for room in (1, 2, 3))
    job.job_s = 1.0
    assert policy.choose([first, chat, job], 0.5) is job
    chat.slo = Slo(0.5)
    assert [policy.choose([first, chat, job], now_s) for now_s in (0.5, 0.7 + PATIENCE_S)] == [first, job]
    assert policy.choose([chat, job], 0.5) is chat


@pytest.mark.parametrize("arrival_s", [100.0, 130.0, 100.0 + AHEAD_S])
def test_no_job_whose_text_is_cached_passes_who_has_waited_for_longer_than_a_bound(arrival_s: float) -> None:
    policy = FirstCome(lambda request: 3)
    waiting, later = request(1, 100.0), request(2, arrival_s)
    later.job_s = 1e6
    assert (policy.choose([waiting, later], 1e9) is later) == (arrival_s < 100.0 + AHEAD_S)


@pytest.mark.parametrize("name", ["fcfs", "lpm", "priority"])
def test_no_job_passes_who_has_waited_for_longer_than_a_bound(name: str) -> None:
    """Whoever arrives so much later ranks behind, however old its job is: nobody starves."""
    policy, rng = POLICIES[name](lambda request: 0), np.random.default_rng(7)
    waiting = request(1, 100.0)
    for room in range(2, 200):
        later = request(room, 100.0 + AHEAD_S + rng.exponential(20.0))
        later.job_s = float(rng.exponential(5000.0))
        assert policy.rank(later) > policy.rank(waiting)
