"""What a planner makes of a beginning: cold caches, prompts that wait, a load that was watched for a minute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_world import H200

from diptych.common.members.roles import Role
from diptych.planner.backlog import with_backlog
from diptych.planner.demand import demand
from diptych.planner.expect import MAX_RISE, expect
from diptych.planner.plan import plan
from diptych.planner.planner import Planner
from diptych.planner.predict import predict
from diptych.planner.sizing import Room, Sizing
from diptych.planner.values import (
    Goal,
    Kind,
    Limits,
    Memory,
    Need,
    Observed,
    Occupancy,
    Offered,
    Plan,
    Sizes,
    Why,
    Worker,
    WorkerState,
)

IDLE = Occupancy(0, 0, 0, 0, 0.0)
GOAL = Goal(4.0, 0.03, 0.9)
ONE = Sizes(both=1)
HIT, MISS = Kind(1.0, 40_000.0, 38_000.0, 200.0), Kind(1.0, 60_000.0, 0.0, 200.0)


def mixed(hits: float, misses: float) -> tuple[Kind, ...]:
    return tuple(each._replace(requests_per_s=rate) for each, rate in ((HIT, hits), (MISS, misses)) if rate)


def seen(now_s: float, short: tuple[Kind, ...], long: tuple[Kind, ...], num: int = 1, since_s: float = 0.0) -> Observed:
    """`since_s`: when all workers came."""
    there = tuple(Worker(each, Role.UNIFIED, WorkerState.READY, since_s, IDLE) for each in range(num))
    windows = (Offered(min(60.0, now_s), short), Offered(min(300.0, now_s), long))
    return Observed(now_s, there, windows, GOAL, H200, Limits(ONE, budget_gpus=4), start_s=100.0)


def test_hits_are_in_time_where_prompts_of_the_mean_would_all_be_late() -> None:
    kinds = mixed(0.45, 0.02)
    rate = sum(each.requests_per_s for each in kinds)
    mean = Kind(rate, *(sum(each.requests_per_s * each[n] for each in kinds) / rate for n in (1, 2, 3)))
    quick = GOAL._replace(ttft_s=0.3)
    apart, together = (predict(H200, ONE, demand(each, H200), quick).kept for each in (kinds, (mean,)))
    assert apart > 0.8
    assert together == 0.0


def test_first_prompts_that_wait_for_cold_caches_are_no_load() -> None:
    heap = mixed(0.05, 0.5)
    cold, memory = plan(seen(45.0, heap, heap), Memory())
    assert cold.sizes == ONE
    assert Why.WARMING in cold.why
    assert memory.needs == ()
    warm, _ = plan(seen(1000.0, heap, heap), memory)
    assert warm.both > 1


def lined_up(
    now_s: float, waits_s: float, since_s: tuple[float, ...] = (0.0,), tokens: int = 400_000, goal: Goal = GOAL
) -> Sizes:
    """Return what is asked for while caches fill and requests with so many tokens wait at each of the workers."""
    held = Occupancy(4, 8, tokens, 0, 800.0, waits_s)
    there = tuple(Worker(each, Role.UNIFIED, WorkerState.READY, came_s, held) for each, came_s in enumerate(since_s))
    heap = mixed(0.05, 0.8)
    return plan(replace(seen(now_s, heap, heap), workers=there, goal=goal), Memory())[0].sizes


def test_a_line_that_lasts_while_caches_fill_is_no_heap_and_brings_one_worker() -> None:
    assert lined_up(30.0, 20.0) == ONE
    assert lined_up(45.0, 31.0) == Sizes(both=2)
    assert lined_up(45.0, 31.0, tokens=40_000) == ONE  # one prompt that others passed
    assert lined_up(60.0, 40.0, since_s=(0.0, 45.0)) == Sizes(both=2)  # it came before the second worker did
    assert lined_up(90.0, 40.0, since_s=(0.0, 45.0)) == Sizes(both=3)


def test_where_any_first_token_is_in_time_a_line_is_what_keeps_workers_busy_for_longer_than_usual() -> None:
    any_time = GOAL._replace(ttft_s=0.0)
    assert lined_up(45.0, 31.0, tokens=40_000, goal=any_time) == ONE
    assert lined_up(45.0, 31.0, tokens=400_000, goal=any_time) == Sizes(both=2)


def test_a_line_of_prompts_is_as_long_however_many_workers_make_outputs() -> None:
    heap, limits = mixed(0.05, 0.8), Limits(Sizes(1, 1, 0), budget_gpus=6)
    waiting = Occupancy(4, 8, 200_000, 0, 800.0, 31.0)
    for num_decode in (1, 4):
        decoding = (Worker(each, Role.DECODE, WorkerState.READY, 0.0, IDLE) for each in range(1, 1 + num_decode))
        there = (Worker(0, Role.PREFILL, WorkerState.READY, 0.0, waiting), *decoding)
        made, _ = plan(replace(seen(45.0, heap, heap), workers=there, limits=limits), Memory())
        assert made.sizes == Sizes(prefill=2, decode=num_decode)


@pytest.mark.parametrize(("start_s", "cold"), [(100.0, 8), (200.0, 4)])
def test_a_load_that_stays_is_grown_for_once_caches_have_had_time(start_s: float, cold: int) -> None:
    """Once there is a minute without the first one in it; sooner where it would be too late then."""
    planner, made = Planner(), []
    for number in range(1, 11):
        observed = seen(15.0 * number, mixed(0.0, 0.6), mixed(0.0, 0.6))
        made.append(planner(replace(observed, start_s=start_s)))
    assert [each.both > 1 for each in made] == [False] * cold + [True] * (10 - cold)


def test_nobody_who_serves_is_no_cold_cache() -> None:
    asleep = seen(30.0, mixed(0.0, 0.5), mixed(0.0, 0.5), num=0)
    assert plan(asleep, Memory())[0].both >= 1


def test_a_fleet_that_went_to_sleep_just_now_is_no_cold_cache() -> None:
    asleep = replace(seen(1000.0, mixed(0.5, 0.0), mixed(0.5, 0.0), num=0), limits=Limits(budget_gpus=4))
    made, _ = plan(asleep, Memory(began_s=0.0, shrunk_s=970.0))
    assert Why.GROWS in made.why
    assert made.both >= 1


def test_who_has_seen_nothing_for_a_while_has_watched_only_since_then() -> None:
    """Nobody answered for ten minutes: a load that just pauses must not be taken for all that there was."""
    planner, busy, calm = Planner(), (Kind(6.0, 8000.0, 0.0, 100.0),), (Kind(0.5, 2000.0, 0.0, 100.0),)
    for number in range(30):
        planner(seen(5000.0 + 15 * number, busy, busy, num=4))
    back = [planner(seen(6100.0 + 15 * number, calm, calm, num=4)).both for number in range(4)]
    assert back == [4] * 4


def test_long_windows_that_began_with_cold_caches_say_nothing() -> None:
    now, before = mixed(0.5, 0.01), mixed(0.3, 0.2)
    assert expect(seen(150.0, now, before), Memory()).kinds == now
    assert expect(seen(150.0, now, before, since_s=-1000.0), Memory(shrunk_s=100.0)).kinds == now
    few, usual = mixed(0.03, 0.02), mixed(0.03, 0.01)
    assert expect(seen(150.0, few, usual), Memory()).kinds == few
    assert expect(seen(1000.0, few, usual), Memory()).kinds == usual


def test_a_minute_with_more_of_the_long_prompts_than_usual_is_no_other_load() -> None:
    """What few requests cost most of swings more than their number: 60 long ones of 400 are 40 or 80 by chance."""
    small, large = Kind(1.0, 500.0, 0.0, 150.0), Kind(1.0, 16_384.0, 0.0, 250.0)

    def bimodal(smalls: float, larges: float) -> tuple[Kind, ...]:
        return small._replace(requests_per_s=smalls), large._replace(requests_per_s=larges)

    usual = bimodal(5.1, 0.9)
    assert expect(seen(5000.0, bimodal(5.1, 1.15), usual), Memory()).kinds == usual
    assert expect(seen(5000.0, bimodal(5.1, 0.65), usual), Memory()).kinds == usual
    twice = bimodal(5.1, 1.8)
    assert expect(seen(5000.0, twice, usual), Memory()).kinds == twice
    even = Kind(6.0, 2900.0, 0.0, 165.0)
    more = even._replace(prompt_len=2900.0 * 1.25)
    assert expect(seen(5000.0, (more,), (even,)), Memory()).kinds == (more,)


def test_a_rate_that_rises_is_expected_to_go_on_by_its_rate_alone() -> None:
    longer = (HIT._replace(prompt_len=90_000.0),)
    assert expect(seen(1000.0, longer, (HIT,)), Memory()).rise == 1.0
    rising = expect(seen(1000.0, mixed(1.5, 0.0), mixed(1.0, 0.0)), Memory())
    assert rising.rise == pytest.approx(1 + 0.5 / 120 * 100 / 1.5)
    shorter = (HIT._replace(requests_per_s=1.5, prompt_len=20_000.0, cached_len=18_600.0),)
    assert expect(seen(1000.0, shorter, (HIT,)), Memory()).kinds == mixed(1.5, 0.0)


def test_the_watch_begins_when_loads_are_remembered() -> None:
    """Else five minutes that were watched had three of which anything is known."""
    planner, load = Planner(), (Kind(11.0, 2000.0, 0.0, 100.0),)
    left = {15 * number: planner(seen(15.0 * number, load, load, num=2)).both for number in range(1, 31)}
    assert min(at_s for at_s, both in left.items() if both == 1) == 435  # two minutes that are new, and five


def test_nobody_goes_who_would_be_missed_once_the_load_has_risen_further() -> None:
    """Workers that start at once are asked for late enough: but who goes leaves the others to a load that rises."""

    def left(before: float) -> int:
        usual, now = (Kind(before, 2000.0, 0.0, 100.0),), (Kind(11.0, 2000.0, 0.0, 100.0),)
        watched = Memory(began_s=0.0, needs=(Need(950.0, usual, demand(usual, H200).work),))
        return plan(replace(seen(1000.0, now, usual, num=2), start_s=0.0), watched)[0].both

    of_eleven = demand((Kind(11.0, 2000.0, 0.0, 100.0),), H200)
    sizing = Sizing(H200, GOAL)
    assert sizing.holds(ONE, of_eleven.times(1.2))
    assert not sizing.holds(ONE, of_eleven.times(1.2 * MAX_RISE))
    assert left(11.0) == left(10.8) == 1
    assert left(8.0) == 2


def test_where_all_prompts_are_late_in_any_case_nobody_waits_for_ever() -> None:
    late = (Kind(0.2, 120_000.0, 0.0, 10.0),)
    made, _ = plan(seen(1000.0, late, late), Memory(began_s=0.0))
    assert Why.UNREACHABLE_TTFT in made.why
    assert predict(H200, made.sizes, demand(late, H200), GOAL).is_steady
    assert not predict(H200, ONE, demand(late, H200), GOAL).is_steady


@pytest.mark.parametrize(
    ("rate", "watched_s", "left"),
    [(1.0, 75.0, 1), (1.0, 30.0, 2), (1.0, 400.0, 1), (0.1, 75.0, 2), (11.0, 75.0, 2), (11.0, 400.0, 1)],
)
def test_who_has_just_begun_lets_go_of_workers_only_where_much_fewer_would_do(
    rate: float, watched_s: float, left: int
) -> None:
    kinds = (Kind(rate, 2000.0, 0.0, 100.0),)
    assert Sizing(H200, GOAL).holds(ONE, demand(kinds, H200).times(1.2))
    assert min(each.both for each in _rounds(kinds, watched_s)) == left


def _rounds(kinds: tuple[Kind, ...], watched_s: float) -> list[Plan]:
    planner = Planner()
    times = [15.0 * number for number in range(1, int(watched_s / 15) + 2)]
    return [planner(seen(5000.0 + at_s, kinds, kinds, num=2, since_s=0.0)) for at_s in times]


def test_a_fleet_grows_by_workers_of_the_roles_that_it_has() -> None:
    long_outputs = MISS._replace(requests_per_s=0.02, output_len=1000.0)
    load = demand((HIT._replace(requests_per_s=1.39, output_len=400.0), long_outputs), H200)
    sizing, two = Sizing(H200, GOAL), Sizes(both=2)
    assert sizing.kept(Sizes(0, 1, 1), load) > sizing.kept(two, load) > GOAL.share
    assert sizing.smallest(load, Room(ONE, Sizes(8, 8, 8), 8), ONE) == two


def test_what_is_worked_off_in_time_is_no_backlog_though_the_goal_leaves_little() -> None:
    load, sizing = demand(mixed(0.7, 0.042), H200), Sizing(H200, GOAL)
    assert sizing.held(ONE, load) < 1.2
    there = Worker(1, Role.UNIFIED, WorkerState.READY, 0.0, Occupancy(4, 4, 280_000, 0, 0.0))
    observed = replace(seen(1000.0, (), ()), workers=(there,))
    assert with_backlog(observed, ONE, load, sizing).demand.backlog == 0
    soon = replace(observed, start_s=1.0)
    assert with_backlog(soon, ONE, load, sizing).demand.backlog > 0


def test_of_a_hard_load_no_more_is_asked_than_could_be_kept_of_it() -> None:
    late, usual = Kind(0.02, 120_000.0, 0.0, 10.0), (Kind(1.0, 2000.0, 0.0, 100.0),)
    hard = Need(950.0, (late,), 10.0)
    watched = Memory(began_s=0.0, needs=(hard,))
    assert plan(seen(1000.0, usual, usual, num=2), watched)[0].sizes == ONE
