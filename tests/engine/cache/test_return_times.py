from __future__ import annotations

import numpy as np
import pytest

from diptych.engine.cache.return_times import (
    EDGES_S,
    HORIZON_S,
    MAX_TOOLS,
    ReturnTimes,
    ToolKey,
    bucket_of,
    curve_of,
)

SHELL, BUILD = ToolKey("", "shell"), ToolKey("", "build")


def learned(key: ToolKey, gaps_s: list[float], times: ReturnTimes | None = None) -> ReturnTimes:
    """Sessions that come back after these times; infinite: they do not."""
    times = times or ReturnTimes()
    for gap_s in gaps_s:
        bucket = bucket_of(gap_s)
        if bucket:
            times.passed(key, 0, bucket)
        if bucket < len(EDGES_S):
            times.returned(key, bucket, bucket)
    return times


def test_a_text_is_kept_until_nearly_all_are_back() -> None:
    times = learned(SHELL, [2.0] * 300)
    assert 2.0 <= times.ttl_s(SHELL, price=0.2) <= 2.0 * 2**0.5


def test_memory_without_worth_is_given_to_whoever_may_still_come_back() -> None:
    assert learned(SHELL, [2.0] * 30 + [500.0]).ttl_s(SHELL, price=0.0) > 500.0


def test_dear_memory_is_kept_for_nobody() -> None:
    assert learned(SHELL, [60.0] * 100).ttl_s(SHELL, price=10.0) == 0.0


def test_the_time_is_that_of_the_least_cost() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        curve, price = curve_of(rng.uniform(0, 0.5, len(EDGES_S))), float(10 ** rng.uniform(-4, 0.5))
        at_s = (0.0, *EDGES_S)
        steps_s = np.diff(np.array(at_s))
        held = [float((steps_s[:k] * (curve.away[:k] + curve.away[1 : k + 1]) / 2).sum()) for k in range(len(at_s))]
        costs = [price * held[k] + float(curve.away[k] - curve.away[-1]) for k in range(len(at_s))]
        assert curve.ttl_s(price) == at_s[int(np.argmin(costs))]


def test_a_dearer_second_never_makes_it_longer() -> None:
    times = learned(SHELL, [0.5, 2.0, 3.0, 8.0, 20.0, 90.0] * 20)
    ttls = [times.ttl_s(SHELL, 10.0**exponent) for exponent in range(-5, 2)]
    assert ttls == sorted(ttls, reverse=True)


def test_tools_are_told_apart_and_a_new_one_is_taken_to_be_like_the_others() -> None:
    times = learned(BUILD, [120.0] * 200, learned(SHELL, [1.0] * 200))
    assert times.ttl_s(SHELL, 0.02) < 5.0
    assert times.ttl_s(BUILD, 0.005) > 100.0
    assert times.ttl_s(ToolKey("", "new"), 0.0005) > 100.0


def test_tenants_do_not_learn_from_each_other_once_they_have_sessions_of_their_own() -> None:
    other = ToolKey("other", "shell")
    times = learned(other, [100.0] * 200, learned(SHELL, [1.0] * 200))
    assert times.ttl_s(SHELL, 0.02) < 5.0
    assert times.ttl_s(other, 0.005) > 50.0


def test_who_never_comes_back_is_not_waited_for() -> None:
    times = learned(SHELL, [float("inf")] * 300 + [1.0] * 30)
    assert times.ttl_s(SHELL, 0.01) <= 2.0


def test_who_has_been_away_for_longer_than_usual_brings_less() -> None:
    times = learned(SHELL, [2.0] * 200 + [float("inf")] * 20)
    assert times.index(SHELL, 1.0) > 10 * times.index(SHELL, 30.0)
    assert times.index(SHELL, HORIZON_S + 1) == 0.0


def test_what_changes_is_learned_anew() -> None:
    times = learned(SHELL, [1.0] * 400)
    assert times.ttl_s(SHELL, 0.05) < 30.0
    assert learned(SHELL, [100.0] * 2000, times).ttl_s(SHELL, 0.005) > 50.0


def test_strangers_names_take_bounded_memory() -> None:
    times = ReturnTimes()
    for number in range(2 * MAX_TOOLS):
        times.returned(ToolKey("", str(number)), 0, 1)
    assert len(times) == MAX_TOOLS


def test_a_tenant_with_many_names_of_tools_takes_no_more_than_its_share_from_others() -> None:
    times = learned(SHELL, [1.0] * 200)
    for number in range(2 * MAX_TOOLS):
        learned(ToolKey("other", str(number)), [100.0], times)
    assert len(times) == MAX_TOOLS
    assert times.index(SHELL, 0.5) > 10 * times.index(ToolKey("", "new"), 0.5), "of the latter nothing is known"


def test_strangers_who_are_many_tenants_take_bounded_memory() -> None:
    times = ReturnTimes()
    for number in range(2 * MAX_TOOLS):
        times.returned(ToolKey(str(number), "shell"), 0, 1)
    assert len(times) == len(times._tools) == MAX_TOOLS


@pytest.mark.parametrize("price", [0.0, 0.01, 1.0])
def test_a_tool_of_which_nothing_is_known_has_a_time(price: float) -> None:
    assert 0.0 <= ReturnTimes().ttl_s(SHELL, price) <= HORIZON_S
