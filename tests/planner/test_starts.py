"""Workers that do not come, and for how long nobody asks for more."""

from __future__ import annotations

from planner_world import GOAL, H200

from diptych.common.members.roles import Role
from diptych.planner.starts import LONGEST_PAUSE_S, fleet, starts
from diptych.planner.values import Limits, Memory, Observed, Worker, WorkerState


def test_starts_that_fail_for_weeks_are_tried_again_each_half_hour() -> None:
    memory = Memory()
    for number in range(1100):
        failed = Worker(number, Role.UNIFIED, WorkerState.FAILED, 0.0)
        observed = Observed(1e4 * number, (failed,), (), GOAL, H200, Limits(budget_gpus=8))
        found = starts(observed, fleet(observed), memory)
        memory = Memory(troubles=found.troubles, troubled_ids=found.troubled_ids)
    (trouble,) = memory.troubles
    assert trouble.num_failures == 1100
    assert trouble.retry_s == observed.now_s + LONGEST_PAUSE_S
