"""What holds for every plan, whatever is observed; and who leaves."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import H200

from diptych.common.members.roles import Role
from diptych.planner.plan import plan
from diptych.planner.planner import Planner
from diptych.planner.values import (
    NO_WORKERS,
    PLANNED_ROLES,
    UNBOUNDED,
    Goal,
    Kind,
    Limits,
    Memory,
    Need,
    Observed,
    Occupancy,
    Offered,
    Sizes,
    Why,
    Worker,
    WorkerState,
)

IDLE = Occupancy(0, 0, 0, 0, 0.0)
GOAL = Goal(1.0, 0.03, 0.9)
LATER = Memory(began_s=0.0)  # of a planner that has watched for long

kinds = st.builds(
    Kind,
    st.floats(0, 20) | st.just(math.nan),
    st.floats(1, 60_000),
    st.just(0.0),
    st.floats(1, 2000) | st.just(math.nan),
)
windows = st.tuples(*(st.builds(Offered, st.just(each), st.none() | st.tuples(kinds)) for each in (60.0, 300.0)))
occupancies = st.none() | st.builds(
    Occupancy, *(st.integers(0, n) for n in (200, 200, 10**6, 10**6)), st.floats(0, 1e5), st.floats(0, 60)
)
workers = st.lists(
    st.tuples(st.sampled_from(PLANNED_ROLES), st.sampled_from(WorkerState), st.floats(0, 1e4), occupancies), max_size=8
).map(lambda found: tuple(Worker(number, *each) for number, each in enumerate(found)))
sizes = st.builds(Sizes, *(st.integers(0, 3) for _ in PLANNED_ROLES))
limits = st.builds(Limits, sizes, st.none() | st.just(Sizes(4, 4, 4)), st.none() | st.integers(0, 12))
goals = st.builds(Goal, st.sampled_from([0.0, 0.05, 1.0]), st.sampled_from([0.0, 0.003, 0.03]), st.just(0.9))


@settings(max_examples=40, deadline=None)
@given(workers, windows, limits, goals, st.integers(0, 50))
def test_every_plan_keeps_within_its_limits_names_workers_that_exist_and_says_why(
    there: tuple[Worker, ...], asked: tuple[Offered, ...], bounds: Limits, goal: Goal, num_queued: int
) -> None:
    observed = Observed(1e4, there, asked, goal, H200, bounds, num_queued, 100 * num_queued)
    planner = Planner()
    for at_s in (0.0, 15.0, 400.0):
        made = planner(replace(observed, now_s=1e4 + at_s))
        known = {each.worker_id: each for each in there}
        assert set(made.leaving) | {each.worker_id for each in made.roles} <= known.keys()
        assert not set(made.leaving) & {each.worker_id for each in made.roles}
        assert min(made.sizes) >= 0
        assert made.reasons
        if bounds.budget_gpus is not None:
            assert made.sizes.total <= bounds.budget_gpus
            floor_fits = bounds.least.total <= bounds.budget_gpus - sum(
                each.state is WorkerState.DRAINING for each in there
            )
            assert not floor_fits or all(a >= b for a, b in zip(made.sizes, bounds.least, strict=True))
        else:
            assert made.sizes.total <= len(there)
    again = Planner()
    assert [again(observed), again(observed)][0] == plan(observed, Memory())[0]


def _seen(*there: Worker, rate: float, limits: Limits) -> Observed:
    asked = tuple(Offered(each, (Kind(rate, 4000, 0, 100),) if rate else ()) for each in (60.0, 300.0))
    return Observed(1e4, there, asked, GOAL, H200, limits)


def test_who_goes_is_the_one_whose_cache_is_worth_least() -> None:
    """Not the emptiest: what only one worker has cached would have to be computed again."""
    busy, bounds = _running(IDLE, 5), Limits(budget_gpus=8)
    there = [
        Worker(1, Role.UNIFIED, WorkerState.READY, 0.0, IDLE, only_here_tokens=900_000),
        Worker(2, Role.UNIFIED, WorkerState.READY, 0.0, busy, only_here_tokens=1_000),
        Worker(3, Role.UNIFIED, WorkerState.READY, 0.0, IDLE, only_here_tokens=50_000),
    ]
    made, _ = plan(_seen(*there, rate=3.0, limits=bounds), LATER)
    assert made.leaving == (2,)
    coming = Worker(4, Role.UNIFIED, WorkerState.STARTING, 1e4 - 5, None)
    made, _ = plan(_seen(*there, coming, rate=3.0, limits=bounds), LATER)
    assert made.leaving == (4,)  # has nothing yet


def _running(held: Occupancy, number: int) -> Occupancy:
    return held._replace(num_running=number, context_tokens=4000 * number, output_tokens_left=50.0 * number)


def test_budgets_say_the_role_and_what_the_goal_leaves_for_prompts() -> None:
    there = [Worker(n, role, WorkerState.READY, 0.0, IDLE) for n, role in enumerate(PLANNED_ROLES)]
    made, _ = plan(_seen(*there, rate=3.0, limits=Limits(budget_gpus=3)), Memory())
    prefill, decode, both = (budget for _, budget in made.budgets)
    assert (prefill, decode) == (UNBOUNDED, 0)
    assert 700 < both < 1300  # of 30 ms, less those of a step, at 21 us a token
    whenever = replace(_seen(*there, rate=3.0, limits=Limits(budget_gpus=3)), goal=Goal(1.0, 0.0, 0.9))
    assert dict(plan(whenever, Memory())[0].budgets)[2] == UNBOUNDED


def test_nothing_waits_for_a_goal_that_nobody_can_keep() -> None:
    one = Worker(1, Role.UNIFIED, WorkerState.READY, 0.0, IDLE)
    seen = replace(_seen(one, rate=1.0, limits=Limits(budget_gpus=64)), goal=Goal(0.05, 0.002, 0.9))
    made, _ = plan(seen, Memory())
    assert made.why >= {Why.UNREACHABLE_TTFT, Why.UNREACHABLE_TPOT}
    assert made.sizes.total <= 2


def test_measurements_that_say_again_and_again_that_less_is_kept_are_believed() -> None:
    one = Worker(1, Role.UNIFIED, WorkerState.READY, 0.0, IDLE)
    seen = replace(_seen(one, rate=5.0, limits=Limits(budget_gpus=8)), attained=0.5)
    planner, made = Planner(), []
    for number in range(12):
        made.append(planner(replace(seen, now_s=1e4 + 15 * number)))
    assert made[0].both == 1
    assert sum(Why.MISSED in each.why for each in made) >= 2
    assert made[-1].sizes.total == 2
    assert planner.memory.correction <= 2.0


def test_what_was_missed_before_the_newest_worker_came_says_nothing_of_those_that_are_there_now() -> None:
    old, new = (Worker(n, Role.UNIFIED, WorkerState.READY, since_s, IDLE) for n, since_s in ((1, 0.0), (2, 1e4)))
    seen = replace(_seen(old, new, rate=4.0, limits=Limits(budget_gpus=8)), attained=0.5)
    planner = Planner()
    whys = [planner(replace(seen, now_s=1e4 + 15 * number)).why for number in range(25)]
    assert next(number for number, why in enumerate(whys) if Why.MISSED in why) * 15 >= seen.limits.stable_s


def test_an_empty_fleet_that_may_be_empty_is_woken_by_the_first_request() -> None:
    idle, _ = plan(_seen(rate=0.0, limits=Limits(budget_gpus=4)), LATER)
    assert idle.sizes == NO_WORKERS
    asked, _ = plan(_seen(rate=0.1, limits=Limits(budget_gpus=4)), LATER)
    assert asked.sizes.serves
    missing = replace(_seen(rate=0.0, limits=Limits(budget_gpus=4)), workers=(), offered=(Offered(60.0, None),))
    long_ago = replace(LATER, unknown_since_s=0.0, needs=(Need(0.0, (Kind(2.0, 1000.0, 0.0, 100.0),), 1.0),))
    assert plan(missing, long_ago)[0].sizes.serves  # nobody is there who could say that nobody asks
    queued, _ = plan(replace(_seen(rate=0.0, limits=Limits(budget_gpus=4)), num_queued=3), LATER)
    assert queued.sizes.serves
