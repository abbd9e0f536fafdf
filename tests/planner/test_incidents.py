"""Twelve incidents of other planners, each as a scenario that ours gets through; the reports are named in each."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

from planner_world import GOAL, LIMITS, World, fixed, turns

from diptych.common.members.roles import Role
from diptych.planner.values import (
    Goal,
    Kind,
    Limits,
    Observed,
    Offered,
    Sizes,
    Why,
    WorkerState,
)

ONE, TWO = Sizes(both=1), Sizes(both=2)
BOTH = replace(LIMITS, most=Sizes(both=16))


def documents(rng: Random) -> tuple[int, int]:
    """Prompts of 8,000 tokens in the mean: a worker computes about three a second, within a first token's second."""
    return max(16, round(rng.gauss(8000, 2000))), max(2, round(rng.expovariate(1 / 100)))


def test_a_constant_load_at_the_border_of_two_sizes_makes_nothing_swing() -> None:
    """ai-dynamo/dynamo#9294: two workers half busy went to one, which was too few, and back, for ever."""
    for rate in (1.5, 2.5):
        world = World().has(TWO).run(1500, rate, documents)
        assert turns(world.targets()) == 0
        assert world.attained(300, 1450) >= GOAL.share
        assert Why.SHRINKS not in world.last.why or world.sizes() == ONE


def test_an_idle_fleet_whose_mean_lengths_are_no_numbers_shrinks_to_its_minimum() -> None:
    """ai-dynamo/dynamo#6985: zero requests made means NaN, and NaN made no decision: seven workers stayed for ever."""

    def seen(observed: Observed) -> Observed:
        idle = (Kind(0.0, math.nan, math.nan, math.nan),)
        return replace(observed, offered=tuple(Offered(each.window_s, each.kinds or idle) for each in observed.offered))

    world = World(seen=seen).has(Sizes(both=7)).run(700, 0.0, documents)
    assert world.sizes() == LIMITS.least
    assert Why.IDLE in world.last.why


def test_a_floor_holds_without_metrics_and_one_that_cannot_be_kept_is_not_waited_for() -> None:
    """ai-dynamo/dynamo#11624: no metrics, no decision: the fleet stayed below its floor, which could not help."""
    limits = Limits(least=Sizes(both=3), budget_gpus=16)
    world = World(limits=limits, seen=_without_load).has(ONE).run(120, 0.0, documents)
    assert world.sizes() == limits.least
    assert Why.LOAD_UNKNOWN in world.last.why
    poor = replace(limits, budget_gpus=2)
    world = World(limits=poor).has(ONE).run(120, 0.0, documents)
    assert world.sizes() == TWO
    assert Why.FLOOR in world.last.why


def test_a_worker_that_is_pending_for_an_hour_freezes_nothing() -> None:
    """ai-dynamo/dynamo#14251: a pod without a GPU was waited for; when the load ended, nothing shrank."""
    world = World(places=2, limits=BOTH).has(ONE).run(900, 8.0, documents)
    assert world.sizes() == TWO
    assert any({Why.STUCK, Why.BACKS_OFF} <= each.why for _, each in world.plans)
    backs_off = [each.sizes for at_s, each in world.plans if at_s > 300 and Why.BACKS_OFF in each.why]
    assert set(backs_off) == {TWO}  # what was asked for in vain is given up, and tried again after longer and longer
    assert sum(each.total > before.total for before, each in pairwise(world.targets())) <= 4
    assert Why.SHEDS in world.last.why
    world.run(900, 0.0, documents)
    assert world.sizes(*WorkerState) == LIMITS.least


def test_a_target_that_cannot_be_reached_blocks_no_later_one() -> None:
    """ai-dynamo/dynamo#9774: no decision while scaling is in progress, which it is for ever if it can't succeed."""
    world = World(broken=frozenset({Role.UNIFIED}), start_s=30.0, limits=BOTH).has(ONE).run(600, 5.0, documents)
    assert world.sizes() == ONE
    attempts = [at_s for at_s, each in world.plans if each.sizes.both > 1]
    assert attempts[-1] - attempts[0] > 200  # tried again, after pauses
    world.broken = frozenset()
    world.run(900, 5.0, documents)
    assert world.attained(world.now_s - 300, world.now_s - 50) >= GOAL.share


def test_a_burst_is_seen_in_what_is_there_before_any_window_shows_it() -> None:
    """ai-dynamo/dynamo#10528: a planner that knew rates alone was blind to the queue of a burst."""
    world = World(start_s=20.0).has(ONE).run(600, 1.0, documents)
    began_s = world.now_s
    world.run(60, 9.0, documents)
    grown = [(at_s, each) for at_s, each in world.plans if at_s > began_s and each.sizes.total > 1]
    assert grown[0][0] - began_s <= 2 * world.every_s
    assert Why.BACKLOG in grown[0][1].why


def test_what_somebody_scales_by_hand_is_where_the_plan_goes_on() -> None:
    """ai-dynamo/dynamo#4420: the planner compared with what it had asked for, and never saw six workers too many."""
    world = World().has(ONE).run(400, 1.0, documents)
    assert world.sizes() == ONE
    world.has(Sizes(both=6)).run(15, 1.0, documents)
    assert Why.CHANGED_BY_OTHERS in world.last.why
    world.run(900, 1.0, documents)
    assert world.sizes() == ONE


def test_workers_that_say_nothing_are_named_and_stop_no_decision() -> None:
    """ai-dynamo/dynamo#12591: restored workers published metrics under other names: no data, no decision, for ever."""

    def seen(observed: Observed) -> Observed:
        return replace(observed, workers=tuple(replace(each, occupancy=None) for each in observed.workers))

    world = World(seen=seen).has(ONE).run(500, 5.0, documents)
    assert world.sizes().total >= 2
    assert all(Why.OCCUPANCY_UNKNOWN in each.why for _, each in world.plans)
    assert world.attained(300, 450) >= GOAL.share


def test_gpus_that_cannot_be_counted_are_no_permission() -> None:
    """ai-dynamo/dynamo#13465: the number of GPUs could not be read, and a guess was used without a word."""
    blind = World(limits=replace(LIMITS, budget_gpus=None)).has(ONE).run(200, 5.0, documents)
    assert blind.sizes(*WorkerState) == ONE
    assert all(Why.BUDGET_UNKNOWN in each.why for _, each in blind.plans)
    blind.limits = LIMITS
    assert blind.run(120, 5.0, documents).sizes().total >= 2


def test_a_day_goes_well_from_its_first_request_to_its_last() -> None:
    """ai-dynamo/dynamo#13565: it "does not work end to end"."""
    world = World(start_s=30.0).has(ONE)
    for rate in (1.0, 3.0, 6.0, 3.0, 1.0):
        world.run(400, rate, documents)
    ended_s = world.now_s
    world.run(1500, 0.2, documents)
    assert world.attained(0, ended_s) >= GOAL.share
    assert max(each.total for each in world.targets()) <= 5
    assert world.sizes() == ONE
    assert world.num_flips == 0


def test_the_proportion_of_roles_follows_the_load() -> None:
    """sgl-project/sglang#21703, #14284: prefill and decode are in a proportion that was fixed at launch."""
    pools = Limits(least=Sizes(1, 1, 0), most=Sizes(8, 8, 0), budget_gpus=6)
    world = World(limits=pools, goal=Goal(1.0, 0.012, 0.9), every_s=30.0).has(Sizes(2, 4, 0))
    world.run(900, 9.0, fixed(8000, 50))
    assert world.sizes() == Sizes(3, 1, 0)
    assert world.attained(600, 850) >= 0.9
    assert world.num_flips == 1


def test_prefill_and_decode_are_not_separated_where_that_gains_nothing() -> None:
    """sgl-project/sglang#24488: 32,000 prompt tokens and 512 of output gained nothing from two roles on H200s."""
    goal = Goal(4.0, 0.05, 0.9)
    world = World(goal=goal, limits=replace(LIMITS, budget_gpus=2)).has(TWO)
    world.run(600, 0.6, fixed(32_000, 512))
    assert world.sizes().both == world.sizes().total
    assert world.num_flips == 0
    assert world.attained(100, 500) >= goal.share


def _without_load(observed: Observed) -> Observed:
    return replace(observed, offered=tuple(Offered(each.window_s, None) for each in observed.offered))
