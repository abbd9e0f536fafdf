"""What drafts cost beside the step that has them: what the next one takes longer, where others overlap."""

from __future__ import annotations

import pytest

from diptych.engine.drafting.step_timer import Launched, StepTimer

ROOMS = frozenset({1, 2})


def step(began_s: float, num_drafts: int = 0) -> Launched:
    return Launched(ROOMS, num_drafts, False, began_s, 0.0, 0.0)


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_what_the_step_behind_takes_longer_is_what_drafts_cost(late_s: float) -> None:
    """Steps take a second, or with drafts 1.2, and are launched while the one before runs, but not behind drafts."""
    timer, now_s = StepTimer(), 0.0
    timer.launched(step(now_s))
    for _ in range(12):
        for _ in range(3):
            timer.launched(step(now_s + 0.2))
            timer.committed(now_s := now_s + 1.0)
        timer.launched(step(now_s + 0.2, num_drafts=6))
        timer.committed(now_s := now_s + 1.0)
        timer.committed(now_s := now_s + 1.2)
        timer.launched(step(now_s := now_s + 0.1))
        timer.launched(step(now_s + 0.2))
        timer.committed(now_s := now_s + 1.0 + late_s)
    assert timer.costs.at(2) == pytest.approx(1.0, rel=0.1)
    assert timer.costs.at(8) / timer.costs.at(2) == pytest.approx(1.3 + late_s, rel=0.1)
