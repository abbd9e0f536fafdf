"""What workers tell routers of their queues and their speed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from diptych.common.members.roles import LegKind, Role
from diptych.engine.values.events import AbortRoom

FleetClass = Any  # the fixture's class: test helpers can't be imported
PROMPT = list(range(40))


def test_cached_tokens_of_waiting_prompts_are_not_counted_as_queued(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.PREFILL, Role.DECODE)
    fleet.start(1, PROMPT, 1, 2, max_tokens=1)
    fleet.run()
    core = fleet.workers[1].core
    for room in range(2, 6):
        fleet.start(room, [*PROMPT, 500 + room], 1, 2, max_tokens=1)
    load = core.load()
    assert (load.num_waiting_prompts, load.waiting_tokens, load.blocked_tokens) == (4, 4, 4)
    fleet.deliver(2)  # its grants: the prompts wait to be computed now
    load = core.load()
    assert (load.num_waiting_prompts, load.waiting_tokens, load.blocked_tokens) == (4, 4, 0)
    fleet.run()
    assert (core.load().num_waiting_prompts, core.load().waiting_tokens) == (0, 0)


def test_cached_tokens_of_requests_that_wait_to_be_served_alone_are_not_counted_as_queued(
    fleet_class: FleetClass,
) -> None:
    fleet = fleet_class(Role.UNIFIED)
    fleet.start(1, PROMPT, 1, 1, max_tokens=1)
    fleet.run()
    core = fleet.workers[1].core
    for room in range(2, 14):  # more than there are rows: some wait for theirs, others for a step
        fleet.start(room, [*PROMPT, 500 + room], 1, 1, max_tokens=1)
    assert (core.load().num_waiting_prompts, core.load().waiting_tokens) == (12, 12)
    fleet.run()
    assert (core.load().num_waiting_prompts, core.load().waiting_tokens) == (0, 0)


@pytest.mark.parametrize("num_legs", [4, 12], ids=["granted", "some wait for pages"])
def test_legs_whose_prompts_another_worker_computes_are_no_queued_prompts(
    fleet_class: FleetClass, num_legs: int
) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.PREFILL)
    for room in range(1, num_legs + 1):
        fleet.start_leg(1, room, PROMPT[room:], LegKind.DECODE, 2)
    load = fleet.workers[1].core.load()
    assert (load.num_waiting, load.num_waiting_prompts, load.waiting_tokens) == (num_legs, 0, 0)


def test_the_prompts_ahead_of_a_request_served_alone_are_its_queue_and_not_its_computing(
    fleet_class: FleetClass,
) -> None:
    seconds = itertools.count()
    fleet = fleet_class(Role.UNIFIED, clock=lambda: float(next(seconds)))
    for room in range(3):
        fleet.start(room, range(10 * room, 10 * room + 8), 1, 1, max_tokens=1)  # a step each
    fleet.run()
    stats = [fleet.workers[1].outputs[room][0].stats for room in range(3)]
    assert [(found.grant_s, found.compute_s) for found in stats] == [(0, 1)] * 3
    queued = [found.queue_s for found in stats]
    assert queued == sorted(set(queued)), "each waits for those before it"


@pytest.mark.parametrize("roles", [(Role.UNIFIED,), (Role.PREFILL, Role.DECODE)], ids=["alone", "a pair"])
def test_the_steps_of_a_prompt_are_told_from_the_first_one_on(fleet_class: FleetClass, roles: tuple[Role, ...]) -> None:
    seconds = itertools.count()
    fleet = fleet_class(*roles, clock=lambda: float(next(seconds)))
    fleet.start(1, PROMPT, 1, len(roles), max_tokens=1)
    fleet.run()
    (stats,) = {id(each.stats): each.stats for each in fleet.workers[1].outputs[1] if each.stats}.values()
    assert 1 < len(stats.chunks_s) < 10, "a step takes fewer tokens than the prompt has"
    assert [0.0, *stats.chunks_s, stats.compute_s] == sorted({0.0, *stats.chunks_s, stats.compute_s})


LONG = list(range(200))  # enough of a prompt for others to wait until it is computed


def test_a_prompt_counts_as_queued_but_for_what_another_one_is_computing_of_it(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.PREFILL, Role.DECODE, num_pages=400)
    core = fleet.workers[1].core
    for room in range(1, 5):
        fleet.start(room, [*LONG, 500 + room], 1, 2, max_tokens=1)
    fleet.deliver(2)
    assert core.load().waiting_tokens == 4 * 201, "nobody computes any yet"
    fleet.workers[1].stepping.advance(lambda: None)  # the first 8 tokens of one of them
    assert (core.load().num_waiting_prompts, core.load().waiting_tokens) == (3, 193 + 3)
    fleet.start(5, [*LONG, 505], 1, 2, max_tokens=1)
    assert (core.load().num_waiting_prompts, core.load().waiting_tokens) == (4, 193 + 4)
    fleet.run()
    assert (core.load().num_waiting_prompts, core.load().waiting_tokens) == (0, 0)


def test_a_request_served_alone_counts_as_queued_but_for_what_another_one_is_computing(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED, num_pages=400)
    core = fleet.workers[1].core
    for room in range(1, 5):
        fleet.start(room, [*LONG, 500 + room], 1, 1, max_tokens=1)
    assert (core.load().num_waiting_prompts, core.load().waiting_tokens) == (4, 201 + 3)
    fleet.start(5, LONG, 1, 1, max_tokens=1)  # found whole, but for its last token
    assert (core.load().num_waiting_prompts, core.load().waiting_tokens) == (5, 201 + 4)
    fleet.run()
    assert (core.load().num_waiting_prompts, core.load().waiting_tokens) == (0, 0)


@pytest.mark.parametrize("decode", [1, 2], ids=["alone", "for another worker"])
def test_what_another_one_was_computing_counts_again_when_that_one_is_aborted(
    fleet_class: FleetClass, decode: int
) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, num_pages=400)
    core = fleet.workers[1].core
    for room in range(1, 4):
        fleet.start(room, [*LONG, 500 + room], 1, decode, max_tokens=1)
    fleet.deliver(2)
    fleet.workers[1].stepping.advance(lambda: None)
    assert core.load().waiting_tokens == 193 + 2
    for worker in fleet.workers.values():
        worker.core.handle(AbortRoom(1, "nobody wants it"), 0.0)
    for _ in range(3):  # in which another one is begun
        fleet.advance(1)
        fleet.advance(2)
    assert 201 > core.load().waiting_tokens > 150
    fleet.run()
    assert (core.load().num_waiting_prompts, core.load().waiting_tokens) == (0, 0)
