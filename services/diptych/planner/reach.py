"""Which part of a goal any number of workers could keep: nobody waits for the other part. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from diptych.planner.demand import Demand
from diptych.planner.predict import SPARE
from diptych.planner.values import Capacity, Goal, Reason, Why

_NEAR_ONE: Final = 0.5  # of what a share misses, that may still be missed by those who can be served in time


class Reached(NamedTuple):
    """A goal that can be kept, and what was taken from the one that was set."""

    goal: Goal
    reasons: tuple[Reason, ...]


def reachable(goal: Goal, demand: Demand, capacity: Capacity) -> Reached:
    """Return the part of a goal that can be kept."""
    goal, slow = _without_tpot(goal, demand, capacity)
    late = _late_share(goal, demand, capacity)
    if not late:
        return Reached(goal, slow)
    share = min(goal.share, (1 - late) * (1 - _NEAR_ONE * (1 - goal.share)))
    if share >= goal.share:
        return Reached(goal, slow)
    words = (
        f"{late:.0%} of the requests have prompts that take longer than {goal.ttft_s:g} s on an idle worker: "
        f"{share:.0%} within it is planned for, not {goal.share:.0%}"
    )
    return Reached(goal._replace(share=share), (*slow, Reason(Why.UNREACHABLE_TTFT, words)))


def _without_tpot(goal: Goal, demand: Demand, capacity: Capacity) -> tuple[Goal, tuple[Reason, ...]]:
    """Return the goal without a time per token that a worker with one request would miss."""
    model = capacity.step_model
    alone_s = model.step + demand.row_s
    if not goal.tpot_s or not demand.output_tokens_per_s or alone_s <= goal.tpot_s * SPARE:
        return goal, ()
    words = (
        f"a token takes {alone_s * 1e3:.1f} ms on a worker with one request: {goal.tpot_s * 1e3:g} ms can't be kept "
        "by any number of workers, and is not planned for"
    )
    return goal._replace(tpot_s=0.0), (Reason(Why.UNREACHABLE_TPOT, words),)


def _late_share(goal: Goal, demand: Demand, capacity: Capacity) -> float:
    """Return the share of the requests whose first token is late even on an idle worker."""
    model = capacity.step_model
    late_s = max(model.step, model.prompt_step) / 2  # the step that runs when a prompt comes
    alone_s = ((each.share, each.num_steps * model.prompt_step + each.work_s, each) for each in demand.costs)
    return sum(
        share
        for share, computed_s, each in alone_s
        if goal.ttft_s and late_s + max(each.num_steps * model.step, computed_s) > goal.ttft_s
    )
