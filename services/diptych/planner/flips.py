"""Whether running workers change their roles. Pure.

Rule: only if what is gained while the load stays as it is would pay for the flips several times, and in several rounds
in a row; then a part of the fleet at a time. So a load at the border between two divisions costs no flips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from diptych.common.members.roles import Role
from diptych.planner.demand import Demand
from diptych.planner.leaving import by_cost
from diptych.planner.sizing import Room, Sizing
from diptych.planner.values import PLANNED_ROLES, Flip, Memory, Observed, Reason, Sizes, Why, WorkerState

WINDOW_S: Final = 600.0  # for which a load is taken to stay as it is
WORTH: Final = 3.0  # times its costs that a flip has to gain
ROUNDS: Final = 3  # in a row in which it has to
PAUSE_S: Final = 600.0  # between flips of a fleet that keeps its goal as it is
MAX_PART: Final = 0.25  # of the fleet that changes its roles at once


class Flips(NamedTuple):
    """What changes its role, and what is remembered of it."""

    flips: tuple[Flip, ...]
    memory: Memory
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet of ready workers and the load that it has; `growth_s`: when workers that were asked for may be ready."""

    ready: Sizes
    room: Room
    demand: Demand
    cautious: Demand  # with which fewer workers have to do
    sizing: Sizing
    growth_s: float


class _Gain(NamedTuple):
    sizes: Sizes  # that would be better
    requests: float  # that it gains


def flips(case: Case, observed: Observed, memory: Memory) -> Flips:
    """Return which workers change their role now."""
    quiet = replace(memory, flip_way=None, flip_rounds=0)
    if not observed.limits.may_flip or case.ready.total < 1 or case.demand.requests_per_s <= 0:
        return Flips((), quiet, ())
    held = case.sizing.held(case.ready, case.demand)
    gain = _saved(case) if held >= 1 else _kept_more(case, held)
    ways = _ways(case.ready, gain.sizes) if gain else ()
    if gain is None or not ways:
        return Flips((), quiet, ())
    cost = len(ways) * observed.flip_s * case.demand.requests_per_s / case.ready.total
    if gain.requests <= WORTH * cost:
        words = f"{gain.sizes} would gain {gain.requests:.0f} requests, and {len(ways)} flips cost {cost:.0f}"
        return Flips((), quiet, (Reason(Why.FLIP_NOT_WORTH, words),))
    rounds = memory.flip_rounds + 1 if memory.flip_way == ways[0] else 1
    memory = replace(memory, flip_way=ways[0], flip_rounds=rounds)
    pause_s = PAUSE_S if held >= 1 else 2 * observed.flip_s
    if rounds < ROUNDS or observed.now_s < memory.flipped_s + pause_s:
        words = f"{gain.sizes} would gain {gain.requests:.0f} requests: seen in {rounds} rounds in a row"
        return Flips((), memory, (Reason(Why.FLIP_NOT_SURE, words),))
    chosen = _chosen(_first(ways, case, held), observed)
    words = f"{gain.sizes} gains {gain.requests:.0f} requests in the time that the load is taken to last"
    return Flips(chosen, replace(quiet, flipped_s=observed.now_s), (Reason(Why.FLIPS, words),))


def _saved(case: Case) -> _Gain | None:
    """Return a smaller fleet that would hold the load, if some of the workers had other roles."""
    room = replace(case.room, max_total=case.ready.total - 1)
    fewer = case.sizing.smallest(case.cautious, room, case.ready)
    if fewer is None:
        return None
    part = (case.ready.total - fewer.total) / case.ready.total
    return _Gain(fewer, part * case.demand.requests_per_s * WINDOW_S)


def _kept_more(case: Case, held: float) -> _Gain | None:
    """Return a fleet of the same number that would hold more of the load, if some had other roles."""
    better = case.sizing.best(case.demand, replace(case.room, max_total=case.ready.total))
    more = min(1.0, case.sizing.held(better, case.demand)) - held
    return _Gain(better, more * case.demand.requests_per_s * min(WINDOW_S, case.growth_s)) if more > 0 else None


def _ways(sizes: Sizes, better: Sizes) -> tuple[tuple[Role, Role], ...]:
    """Return the changes, one worker each, that make one fleet of the other; who is left over stays as it is."""
    surplus = [each for each in PLANNED_ROLES for _ in range(sizes.of(each) - better.of(each))]
    missing = [each for each in PLANNED_ROLES for _ in range(better.of(each) - sizes.of(each))]
    return tuple(zip(surplus, missing, strict=False))


def _first(ways: tuple[tuple[Role, Role], ...], case: Case, held: float) -> tuple[tuple[Role, Role], ...]:
    """Return a part of the changes: as few as may be done at once, all if a part would leave the fleet worse off."""
    part = ways[: max(1, math.floor(case.ready.total * MAX_PART))]
    after = after_flips(case.ready, part)
    return part if after.serves and case.sizing.held(after, case.demand) >= min(held, 1.0) else ways


def after_flips(sizes: Sizes, ways: tuple[tuple[Role, Role], ...]) -> Sizes:
    """Return the sizes after changes of role; who was to go anyway takes the place of one that would have come."""
    for before, after in ways:
        if sizes.of(before):
            sizes = sizes.changed(before, sizes.of(before) - 1)
            sizes = sizes.changed(after, sizes.of(after) + 1)
    return sizes


def _chosen(ways: tuple[tuple[Role, Role], ...], observed: Observed) -> tuple[Flip, ...]:
    """Return which workers change: those first that have least to lose."""
    ready = by_cost(each for each in observed.workers if each.state is WorkerState.READY)
    there: Mapping[Role, list[int]] = {
        role: [each.worker_id for each in ready if each.role is role] for role in PLANNED_ROLES
    }
    return tuple(Flip(there[before].pop(0), after) for before, after in ways)
