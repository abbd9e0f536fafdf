"""Workers that were asked for and do not come: for how long they count, and when to ask again. Pure.

Rule: nothing waits for a worker that may never come. One that finds no place, or does not start, in the time that
starts take counts no more; as many as there are without it are planned with, and after a pause that doubles one more is
asked for, until it comes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from diptych.common.members.roles import Role
from diptych.planner.values import (
    NEVER,
    PLANNED_ROLES,
    Memory,
    Observed,
    Reason,
    Sizes,
    Trouble,
    Why,
    Worker,
    WorkerState,
)

LEAST_PATIENCE_S: Final = 60.0
PENDING_STARTS: Final = 2.0  # times the usual start that a worker may be without a place
STARTING_STARTS: Final = 4.0  # times the usual start that a start may take
FIRST_PAUSE_S: Final = 60.0
LONGEST_PAUSE_S: Final = 1800.0
_MOST_DOUBLINGS: Final = 16  # of pauses: whoever fails for weeks has the longest one all the same
WARM_S: Final = 60.0  # that caches are given to fill
LONG_START: Final = 0.5  # of the time that a worker stays which came in vain: whoever starts so long is not put off
MANY: Final = 1 << 20


class Fleet(NamedTuple):
    """The workers by what can be expected of them."""

    counted: Sizes  # that serve, or will soon
    ready: Sizes
    num_leaving: int  # they hold their GPUs until they are gone
    stuck: tuple[Worker, ...]  # that count no more


def fleet(observed: Observed) -> Fleet:
    """Sort the workers."""
    stuck = tuple(each for each in observed.workers if is_stuck(each, observed.now_s, observed.start_s))
    coming = (WorkerState.PENDING, WorkerState.STARTING, WorkerState.READY)
    counted = [each for each in observed.workers if each.state in coming and each not in stuck]
    return Fleet(
        _sizes(counted),
        _sizes([each for each in counted if each.state is WorkerState.READY]),
        sum(each.state is WorkerState.DRAINING for each in observed.workers),
        stuck,
    )


def is_stuck(worker: Worker, now_s: float, start_s: float) -> bool:
    """Whether a worker is not to be counted on."""
    waited_s = now_s - worker.since_s
    if worker.state is WorkerState.PENDING:
        return waited_s > max(LEAST_PATIENCE_S, PENDING_STARTS * start_s)
    if worker.state is WorkerState.STARTING:
        return waited_s > max(LEAST_PATIENCE_S, STARTING_STARTS * start_s)
    return worker.state is WorkerState.FAILED


def came_s(observed: Observed) -> float:
    """Return when the newest came of those who serve: it is given time to take its share."""
    return max((each.since_s for each in observed.workers if each.state is WorkerState.READY), default=NEVER)


def first_came_s(observed: Observed) -> float:
    """Return when the first came of those who serve: before, nothing was cached."""
    return min((each.since_s for each in observed.workers if each.state is WorkerState.READY), default=NEVER)


def cold_s(observed: Observed, memory: Memory) -> float:
    """Return when caches last had to fill: all who serve came since, or one went with what only it had."""
    return max(first_came_s(observed), memory.shrunk_s)


def is_cold(observed: Observed, memory: Memory) -> bool:
    """Whether caches fill: first prompts come in one heap, and are no measure of what will be."""
    someone_serves = first_came_s(observed) > NEVER
    return someone_serves and (is_new(observed) or observed.now_s - memory.shrunk_s <= WARM_S)


def is_new(observed: Observed) -> bool:
    """Whether even what was asked for over the shortest window is in part of when all caches were cold.

    Where starts take long it is believed all the same: a worker in vain costs less than one that comes too late.
    """
    is_long = observed.start_s > LONG_START * observed.limits.stable_s
    shortest_s = 0.0 if is_long else min((each.window_s for each in observed.offered), default=0.0)
    return observed.now_s - first_came_s(observed) <= WARM_S + shortest_s


class Starts(NamedTuple):
    """What is known of workers that do not come."""

    troubles: tuple[Trouble, ...]
    troubled_ids: frozenset[int]
    most: Sizes  # that may be asked for now
    most_total: int
    reasons: tuple[Reason, ...]


def starts(observed: Observed, workers: Fleet, memory: Memory) -> Starts:
    """Return how many workers it makes sense to ask for: of each role by those that fail, in all by places."""
    told = {each.role: each for each in memory.troubles}
    found = {kind: _trouble(kind, told.get(kind), observed, workers, memory) for kind in (*PLANNED_ROLES, None)}
    troubles = tuple(each for each in found.values() if each is not None)
    most = Sizes(*(_bound(found[role], observed.now_s) for role in PLANNED_ROLES))
    reasons = tuple(each for trouble in troubles for each in _words(trouble, workers, observed.now_s))
    ids = frozenset(each.worker_id for each in workers.stuck)
    return Starts(troubles, ids, most, _bound(found[None], observed.now_s), reasons)


def _stuck(workers: Fleet, kind: Role | None) -> list[Worker]:
    """Return those that do not start of a role, or those of any role that find no place."""
    if kind is None:
        return [each for each in workers.stuck if each.state is WorkerState.PENDING]
    return [each for each in workers.stuck if each.state is not WorkerState.PENDING and each.role is kind]


def _trouble(
    kind: Role | None, told: Trouble | None, observed: Observed, workers: Fleet, memory: Memory
) -> Trouble | None:
    placed, ready = (sizes.total if kind is None else sizes.of(kind) for sizes in (workers.counted, workers.ready))
    if any(each.worker_id not in memory.troubled_ids for each in _stuck(workers, kind)):
        num_failures = told.num_failures + 1 if told else 1
        times = 2 ** min(num_failures - 1, _MOST_DOUBLINGS)
        pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, observed.start_s) * times)
        return Trouble(kind, placed, num_failures, observed.now_s + pause_s)
    if told is None or ready > told.placed or observed.now_s > told.retry_s + LONGEST_PAUSE_S:
        return None  # one more came, or it was long ago
    return told._replace(placed=min(told.placed, placed))


def _bound(trouble: Trouble | None, now_s: float) -> int:
    if trouble is None:
        return MANY
    return trouble.placed if now_s < trouble.retry_s else trouble.placed + 1


def _words(trouble: Trouble, workers: Fleet, now_s: float) -> tuple[Reason, ...]:
    name = "" if trouble.role is None else f"{trouble.role.value} "
    stuck, reasons = _stuck(workers, trouble.role), []
    if stuck:
        states = ", ".join(
            f"{each.worker_id} {each.state.value} for {now_s - each.since_s:.0f} s" for each in stuck[:8]
        )
        reasons.append(Reason(Why.STUCK, f"{len(stuck)} {name}workers do not come ({states})"))
    if now_s < trouble.retry_s:
        words = (
            f"no more than {trouble.placed} {name}workers are asked for in the next {trouble.retry_s - now_s:.0f} s, "
            f"after {trouble.num_failures} attempts in a row"
        )
        reasons.append(Reason(Why.BACKS_OFF, words))
    return tuple(reasons)


def _sizes(workers: list[Worker]) -> Sizes:
    return Sizes(*(sum(each.role is role for each in workers) for role in PLANNED_ROLES))
