"""What was asked for, out of what routers count."""

from __future__ import annotations

import math

import pytest

from diptych.planner.counters import Counts, Finished, Lens, Sample, attained_by, lens_by, offered_by
from diptych.planner.values import Kind, Offered


def counts(ended: float, in_flight: float = 0.0, length: float = 100.0) -> Counts:
    return Counts(ended, ended, ended * length, ended * 20, ended * 50, in_flight)


def test_requests_in_flight_have_come_and_lengths_are_those_of_the_finished() -> None:
    samples = [Sample(0.0, {"a": counts(10, 2)}), Sample(60.0, {"a": counts(30, 42)})]
    assert offered_by(samples, [60.0]) == (Offered(60.0, (Kind(1.0, 100.0, 20.0, 50.0),)),)


def test_a_router_that_began_anew_counts_from_zero_and_a_new_one_from_its_first_answer() -> None:
    samples = [Sample(0.0, {"a": counts(1000)}), Sample(30.0, {"a": counts(15), "b": counts(500)})]
    samples.append(Sample(60.0, {"a": counts(30), "b": counts(530)}))
    (window,) = offered_by(samples, [60.0])
    assert window.requests_per_s == 1.0


def test_a_router_that_does_not_answer_makes_a_window_unknown_and_not_empty() -> None:
    whole = Sample(0.0, {"a": counts(10), "b": counts(10)})
    assert offered_by([whole, Sample(60.0, {"a": counts(20), "b": None})], [60.0]) == (Offered(60.0, None),)
    assert offered_by([whole, Sample(60.0, {})], [60.0]) == (Offered(60.0, None),)
    assert offered_by([], [60.0]) == (Offered(60.0, None),)


def test_nobody_who_asks_is_a_load_of_zero() -> None:
    samples = [Sample(at_s, {"a": counts(10)}) for at_s in (0.0, 30.0, 60.0)]
    assert offered_by(samples, [30.0, 60.0]) == (Offered(30.0, ()), Offered(60.0, ()))


def test_windows_are_as_long_as_was_watched_and_lengths_that_nobody_knows_are_no_numbers() -> None:
    samples = [Sample(0.0, {"a": counts(0)}), Sample(15.0, {"a": counts(0, in_flight=30)})]
    (window,) = offered_by(samples, [60.0, 300.0])
    assert window.window_s == 15.0
    assert window.requests_per_s == 2.0
    assert all(math.isnan(each) for kind in window.kinds or () for each in kind[1:])


def test_requests_of_which_none_finished_are_as_long_as_is_usual() -> None:
    samples = [Sample(0.0, {"a": Counts()}), Sample(60.0, {"a": Counts(ended=120.0)})]
    assert offered_by(samples, [60.0], Lens(100.0, 20.0, 50.0)) == (Offered(60.0, (Kind(2.0, 100.0, 20.0, 50.0),)),)


def test_lengths_are_of_those_that_finished_lately_else_of_all_that_did() -> None:
    old, now = counts(10, length=1000.0), counts(20, length=1000.0)
    assert lens_by([Sample(0.0, {"a": old}), Sample(60.0, {"a": now, "b": None})]) == Lens(1000.0, 20.0, 50.0)
    assert lens_by([Sample(0.0, {"a": old}), Sample(60.0, {"a": old})]) == Lens(1000.0, 20.0, 50.0)
    later = old._replace(finished=old.finished + 10, prompt_tokens=old.prompt_tokens + 500)
    assert lens_by([Sample(0.0, {"a": old}), Sample(60.0, {"a": later})]) == Lens(50.0, 0.0, 0.0)
    assert lens_by([Sample(0.0, {"a": Counts(ended=5.0)})]) is None
    assert lens_by([]) is None


def test_the_share_that_kept_the_goal_is_of_all_that_ended_and_few_say_nothing() -> None:
    before = {"a": counts(10)._replace(within=10), "b": Counts()}
    after = {"a": counts(40)._replace(within=25), "b": counts(20)._replace(within=5)}
    assert attained_by([Sample(0.0, before), Sample(60.0, after)], 60.0) == 0.4
    few = {"a": counts(25)._replace(within=20), "b": Counts()}
    unknown = {"a": counts(100)._replace(within=math.nan), "b": Counts()}
    for last in (few, unknown, {"a": None, "b": Counts()}):
        assert math.isnan(attained_by([Sample(0.0, before), Sample(60.0, last)], 60.0))
    assert math.isnan(attained_by([], 60.0))


def test_prompts_that_are_found_and_those_that_are_not_are_two_kinds() -> None:
    hits, misses = Finished(30, 30_000, 29_700, 300), Finished(10, 10_000, 0, 400)
    both = Counts(40, 40, 40_000, 29_700, 700, 0, sizes={8: hits, 512: misses})
    again = Counts(120, 80, 80_000, 59_400, 1400, 0, sizes={8: Finished(60, 60_000, 59_400, 600), 512: misses})
    kinds = (Kind(0.75, 1000.0, 990.0, 10.0), Kind(0.25, 1000.0, 0.0, 40.0))
    assert offered_by([Sample(0.0, {"a": Counts()}), Sample(40.0, {"a": both})], [60.0]) == (Offered(40.0, kinds),)
    two = [Sample(0.0, {"a": both, "b": Counts()}), Sample(40.0, {"a": again, "b": both})]
    (window,) = offered_by(two, [60.0])
    assert window.kinds is not None
    assert [each[1:] for each in window.kinds] == [each[1:] for each in kinds]
    assert [each.requests_per_s for each in window.kinds] == pytest.approx([3 * 60 / 70, 3 * 10 / 70])


def steady(at_s: float, since_s: float = 0.0, in_flight: float = 10.0) -> Counts:
    """What a router has counted that is there since then, of two requests a second."""
    return counts(2 * (at_s - since_s), in_flight)


def rates(samples: list[Sample]) -> list[float]:
    return [each.requests_per_s for each in offered_by(samples, [60.0, 300.0])]


def test_a_router_that_begins_anew_takes_nothing_of_what_came_before() -> None:
    """Else the long window would have less than the short one, and a load that stays would seem to rise."""
    again = [Sample(at_s, {"a": steady(at_s, 210.0 if at_s > 210 else 0.0)}) for at_s in range(0, 301, 15)]
    assert rates(again) == pytest.approx([2.0, 2.0], rel=0.05)
    rollout = [
        Sample(at_s, {"b" if at_s > 210 else "a": steady(at_s, 210.0 * (at_s > 210))}) for at_s in range(0, 301, 15)
    ]
    assert rates(rollout) == pytest.approx([2.0, 2.0], rel=0.1)


def test_a_router_that_is_listed_again_has_not_counted_all_of_it_meanwhile() -> None:
    """Bootstrap that has just restarted knows few: a day's requests would have come in a quarter of a minute."""
    day_s = 86_400.0
    samples = [
        Sample(at_s, {"a": steady(at_s)} | ({} if at_s == 0 else {"b": steady(at_s + day_s)}))
        for at_s in (0.0, 15.0, 30.0)
    ]
    assert max(rates(samples)) <= 4.0
    gap = [
        Sample(at_s, {"a": steady(at_s)} | ({} if at_s == 240 else {"b": steady(at_s + day_s)}))
        for at_s in range(0, 301, 15)
    ]
    assert rates(gap) == pytest.approx([4.0, 4.0], rel=0.13)


def test_a_scrape_that_fails_amid_a_window_loses_nothing() -> None:
    samples = [Sample(at_s, {"a": None if at_s == 270 else steady(at_s)}) for at_s in range(0, 301, 15)]
    assert rates(samples) == pytest.approx([2.0, 2.0])
