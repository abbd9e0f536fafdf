"""What sizes may be chosen among: floors, ceilings, the GPUs that there are, and workers that do not come. Pure.

Rule: floors stand above what does not come, and the GPUs that there are stand above floors: a floor that can't be kept
is said, and not waited for. GPUs that can't be counted are no permission to ask for more.
"""

from __future__ import annotations

from diptych.planner.sizing import Room
from diptych.planner.starts import MANY, Fleet, Starts
from diptych.planner.values import PLANNED_ROLES, Observed, Reason, Sizes, Why


def room_for(observed: Observed, workers: Fleet, begun: Starts) -> tuple[Room, tuple[Reason, ...]]:
    """Return what may be chosen among. Floors stand above back-off, and what there is of GPUs above floors."""
    limits, reasons = observed.limits, []
    there = workers.counted.total
    if limits.budget_gpus is None:
        words = f"how many GPUs there are can't be read: no more than the {there} workers there are, until it can"
        reasons.append(Reason(Why.BUDGET_UNKNOWN, words))
        total = there
    else:
        budget = limits.budget_gpus // observed.capacity.num_gpus
        total = max(budget - workers.num_leaving, min(there, budget))
    least = limits.least
    if least.total > total:
        words = (
            f"the floor ({least}) needs {least.total} workers, and there is room for {total}: the floor can't be kept"
        )
        reasons.append(Reason(Why.FLOOR, words))
        least = _trimmed(least, total)
    allowed = limits.most or Sizes(MANY, MANY, MANY)
    most = Sizes(*(max(low, min(pair)) for low, *pair in zip(least, allowed, begun.most, strict=True)))
    return Room(least, most, max(least.total, min(total, begun.most_total))), tuple(reasons)


def _trimmed(sizes: Sizes, total: int) -> Sizes:
    """Return fewer workers, taken from the role that has most of them."""
    while sizes.total > max(0, total):
        role = max(PLANNED_ROLES, key=sizes.of)
        sizes = sizes.changed(role, sizes.of(role) - 1)
    return sizes


def clipped(sizes: Sizes, bounds: Room) -> Sizes:
    """Return what limits leave of sizes."""
    within = Sizes(
        *(max(low, min(each, high)) for low, each, high in zip(bounds.least, sizes, bounds.most, strict=True))
    )
    while within.total > bounds.max_total:
        spare = [each for each in PLANNED_ROLES if within.of(each) > bounds.least.of(each)]
        role = max(spare, key=within.of)
        within = within.changed(role, within.of(role) - 1)
    return within
