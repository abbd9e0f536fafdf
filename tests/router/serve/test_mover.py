"""When a router looks for moves, and whose turn it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.generation.slo import Slo
from diptych.router.choose.moves import LEAVING, LOOK_S, TURN_S, WINDOWS, RunningOutput
from diptych.router.choose.policies.policy import Candidates, Worker
from diptych.router.serve.mover import MAX_OUTPUTS, Mover
from diptych.router.workers.worker_view import WorkerLoad

SLO = Slo(ttft_s=1.0, tpot_s=0.03)
LATE, FREE = 1, 2  # workers


@dataclass
class Request:
    """A request whose output is made by the late worker."""

    worker_id: int = LATE
    adapter: str = ""
    targets: list[int] = field(default_factory=list)
    num_asked: int = 0

    def output(self) -> RunningOutput:
        self.num_asked += 1
        return RunningOutput(self.worker_id, SLO, 8000, 200, 1000, self.adapter)

    def move(self, target_id: int, words: str) -> None:
        self.targets.append(target_id)


def worker(key: int, num_outputs: int) -> Worker:
    load = WorkerLoad(
        num_requests=num_outputs,
        queued_tokens=0,
        free_tokens=1_000_000,
        output_tokens=8000 * num_outputs,
        num_outputs=num_outputs,
        output_step_s=0.01,
        context_token_s=1e-6,
        outputs=((SLO, num_outputs),) * bool(num_outputs),
        link_speeds={FREE: 1e10},
    )
    return Worker(key, load, token_bytes=100_000)


def mover(
    requests: list[Request],
    times_s: list[float],
    num_routers: int = 1,
    router_id: int = 10,
    vacating: frozenset[int] = frozenset(),
) -> Mover:
    """One of a router's, which knows of so many; it takes the time from the list."""
    workers = {key: each for key, each in {LATE: worker(LATE, 4), FREE: worker(FREE, 0)}.items() if key not in vacating}
    candidates = Candidates(workers, {key: tuple(workers) for key in workers})
    routers = dict.fromkeys(range(10, 10 + num_routers))
    fleet = SimpleNamespace(router_id=router_id, routers=lambda: routers, vacating=lambda: vacating)
    selector = SimpleNamespace(
        candidates=lambda adapter: candidates,
        output_len=400.0,
        successors=lambda worker_id, adapter: set() if adapter else {LATE, FREE},
    )
    dispatcher = SimpleNamespace(fleet=fleet, selector=selector, running=requests)
    return Mover(cast(Any, dispatcher), clock=lambda: times_s[-1])


@pytest.mark.parametrize("num_routers", [1, 3])
def test_each_router_moves_its_own_outputs_when_it_is_its_turn(num_routers: int) -> None:
    times_s = [1e9]
    owned = [[Request() for _ in range(20)] for _ in range(num_routers)]
    movers = [mover(own, times_s, num_routers, 10 + number) for number, own in enumerate(owned)]
    num_turns = 2 * num_routers
    for _ in range(round(num_turns * TURN_S / LOOK_S)):
        times_s.append(times_s[-1] + LOOK_S)
        for each in movers:
            each.look()
    counts = [sum(len(request.targets) for request in own) for own in owned]
    assert counts == ([num_turns * TURN_S / LOOK_S // WINDOWS] if num_routers == 1 else [2] * num_routers)


def test_outputs_of_workers_that_are_in_time_are_not_asked_for() -> None:
    elsewhere, own = [Request(FREE) for _ in range(5)], [Request() for _ in range(MAX_OUTPUTS + 5)]
    looking = mover([*elsewhere, *own], [1e9])
    for _ in range(WINDOWS):
        looking.look()
    assert sum(each.num_asked for each in elsewhere) == 0
    assert sum(each.num_asked for each in own) == MAX_OUTPUTS
    assert [each.targets for each in own if each.targets] == [[FREE]]


def test_outputs_of_a_worker_that_waits_for_them_go_at_the_first_look_some_at_a_time() -> None:
    own = [Request() for _ in range(LEAVING + 3)]
    mover(own, [1e9], num_routers=3, vacating=frozenset({LATE})).look()
    assert sum(each.targets == [FREE] for each in own) == LEAVING


def test_outputs_that_can_go_nowhere_hold_up_no_others_however_many_they_are() -> None:
    stuck, own = [Request(adapter="tuned") for _ in range(MAX_OUTPUTS)], [Request() for _ in range(3)]
    looking = mover([*stuck, *own], [1e9], vacating=frozenset({LATE}))
    for _ in range(2):
        looking.look()
    assert all(each.targets == [FREE] for each in own)
