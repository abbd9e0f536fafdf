"""A controller sees what a real one would, and its plans are carried out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from simulated import chats, platform, worker

from diptych.common.members.roles import Role
from diptych.generation.slo import Slo
from diptych.planner.plan import plan
from diptych.planner.starts import WARM_S
from diptych.planner.values import Flip, Limits, Memory, Observed, Plan, WorkerState
from diptych.simulator.control import WINDOWS_S, kinds_of
from diptych.simulator.run import simulate
from diptych.simulator.served import Served

SEEN_S = WARM_S + WINDOWS_S[0]  # the first window that has nothing of what came to cold caches


@dataclass
class Told:
    """Wants what it was told, round by round, and then the last of it."""

    plans: list[Plan]
    every_s: float = 1.0
    seen: list[Observed] = field(default_factory=list)

    def __call__(self, observed: Observed) -> Plan:
        self.seen.append(observed)
        return self.plans.pop(0) if len(self.plans) > 1 else self.plans[0]


@dataclass
class Planner:
    """The product's."""

    every_s: float = 2.0
    memory: Memory = Memory()  # noqa: RUF009  # a frozen value

    def __call__(self, observed: Observed) -> Plan:
        made, self.memory = plan(observed, self.memory)
        return made


def test_workers_come_go_and_change_as_planned_and_no_call_is_lost() -> None:
    plans = [
        Plan(0, 0, 1),
        Plan(0, 0, 3),
        Plan(0, 0, 3),
        Plan(1, 1, 1, roles=(Flip(2, Role.PREFILL), Flip(3, Role.DECODE))),
        Plan(0, 0, 1, leaving=(2, 3)),
    ]
    told = Told(plans)
    outcome = simulate(platform("U", more=worker("U", start_s=0.5)), chats(160, apart_s=0.05), told)
    assert set(outcome.failure) == {""}
    assert outcome.num_flips == 2
    numbers = [[each.role for each in seen.workers if each.state is WorkerState.READY] for seen in told.seen]
    assert [len(each) for each in numbers[:4]] == [1, 1, 3, 3]
    assert sorted(map(str, numbers[4])) == sorted(map(str, [Role.UNIFIED, Role.PREFILL, Role.DECODE]))
    assert numbers[-1] == [Role.UNIFIED]
    assert outcome.gpu_s < 3 * outcome.virtual_s


def test_a_controller_sees_who_is_there_what_came_and_who_is_busy() -> None:
    told = Told([Plan(0, 0, 1)])
    simulate(platform("U"), chats(100, apart_s=0.05), told)
    seen = told.seen[2]
    assert seen.now_s == 3.0
    (offered, _) = seen.offered
    assert math.isclose(offered.requests_per_s, 61 / 3)
    assert offered.kinds is not None
    assert all(0 < kind.prompt_len < 4096 and kind.output_len > 0 for kind in offered.kinds)
    occupancy = seen.workers[0].occupancy
    assert occupancy is not None
    assert occupancy.num_running + occupancy.num_waiting > 0
    assert occupancy.context_tokens > 0


def test_hits_and_misses_are_kinds_of_their_own_and_who_waits_is_taken_for_the_others() -> None:
    served = [Served(each, number) for number, each in enumerate(chats(8))]
    assert len(kinds_of(served, 10.0, 50.0)) >= 1
    assert sum(each.cached_len for each in kinds_of(served, 10.0, 50.0)) == 0
    for number, each in enumerate(served[:4]):
        each.knows_cached, each.cached_len = True, (each.call.prompt_len - 1) * (number > 0)
    hits, misses = kinds_of(served, 10.0, 50.0)
    assert [hits.requests_per_s, misses.requests_per_s] == pytest.approx([0.6, 0.2])
    assert (hits.prompt_len - hits.cached_len, misses.cached_len) == (1, 0)


def test_the_planner_gets_more_workers_for_a_load_that_one_can_not_keep() -> None:
    setup = platform("U", slo=Slo(0.5, 0.05), more=worker("U", start_s=2.0), bounds=Limits(budget_gpus=6))
    first, *others = chats(351, apart_s=0.03)
    calls = [first, *(replace(each, arrival_s=each.arrival_s + SEEN_S) for each in others)]
    alone, planned = simulate(setup, calls), simulate(setup, calls, Planner())
    assert set(planned.failure) == {""}
    assert planned.gpu_s > 1.1 * planned.virtual_s
    late = planned.arrival_s > SEEN_S + 8
    assert np.nanmedian(planned.ttft_s[late]) < np.nanmedian(alone.ttft_s[late])


@dataclass
class FlipsOnce:
    """Wants one worker to change its role, and from then on what is there."""

    every_s: float = 0.2
    num_rounds: int = 0

    def __call__(self, observed: Observed) -> Plan:
        self.num_rounds += 1
        there = [each.role for each in observed.workers]
        flips = (Flip(3, Role.PREFILL),) if self.num_rounds == 1 else ()
        return Plan(there.count(Role.PREFILL) + len(flips), there.count(Role.DECODE) - len(flips), 0, roles=flips)


def test_a_role_that_changes_is_seen_as_what_it_becomes() -> None:
    platform_ = platform("PDD", more=worker("U", start_s=0.5))
    outcome = simulate(platform_, chats(60, apart_s=0.05), FlipsOnce())
    assert outcome.num_flips == 1
    assert outcome.gpu_s <= 3 * outcome.virtual_s + 1e-6


def test_what_a_worker_alone_has_cached_is_told() -> None:
    """So the least valuable one is chosen where one has to go."""
    told = Told([Plan(0, 0, 2)])
    simulate(platform("UU"), chats(40, apart_s=0.2), told)
    tokens = [each.only_here_tokens for each in told.seen[-1].workers]
    assert len(tokens) == 2
    assert sum(tokens) > 0
