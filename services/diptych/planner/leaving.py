"""Which workers go, or change their role: those first whose going costs least. Pure.

Who does not serve costs nothing. Among those who serve it is what only they have cached, as the seconds in which others
would have to compute it again, and then how many requests they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from diptych.planner.starts import Fleet, is_stuck
from diptych.planner.values import PLANNED_ROLES, Flip, Observed, Sizes, Worker, WorkerState

_ORDER: Final = (WorkerState.FAILED, WorkerState.PENDING, WorkerState.STARTING, WorkerState.READY)


def by_cost(workers: Iterable[Worker]) -> Sequence[Worker]:
    """Return workers, those first whose going costs least."""

    def cost(worker: Worker) -> tuple[int, float, int, float, int]:
        held = worker.occupancy
        num_requests = held.num_running + held.num_waiting if held else 0
        state = _ORDER.index(worker.state)
        return state, worker.only_here_tokens, num_requests, -worker.since_s, worker.worker_id

    return sorted((each for each in workers if each.state in _ORDER), key=cost)


def leaving(observed: Observed, workers: Fleet, wanted: Sizes, flips: Sequence[Flip]) -> tuple[int, ...]:
    """Return who has to go, that as many are there of each role as are wanted once `flips` are done."""
    flipping = {each.worker_id for each in flips}
    staying = [each for each in observed.workers if each.worker_id not in flipping]
    counted = [each for each in staying if not is_stuck(each, observed.now_s, observed.start_s)]
    gone: list[int] = []
    for role in PLANNED_ROLES:
        there = [each for each in by_cost(counted) if each.role is role]
        stuck = [each for each in by_cost(workers.stuck) if each.role is role]
        missing = wanted.of(role) - len(there) - sum(each.role is role for each in flips)
        gone += [each.worker_id for each in there[: max(0, -missing)]]
        gone += [each.worker_id for each in stuck[max(0, missing) :]]  # the others may still find a place
    return tuple(gone)
