"""How much harder a load is than predicted, as measured: a slow correction of the prediction. Pure.

Rule: what was measured must be of this fleet and of a load that it was predicted to hold. Requests that were missed
while there were too few workers say nothing of those that are there now.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from diptych.planner.demand import Demand
from diptych.planner.sizing import Sizing
from diptych.planner.starts import Fleet, came_s
from diptych.planner.values import Memory, Observed, Reason, Why

MISSED_ROUNDS: Final = 3  # in a row before measurements are believed more than the prediction
MISSED_BY: Final = 0.05  # of the requests
CORRECTION_STEP: Final = 1.15
MAX_CORRECTION: Final = 2.0
CORRECTION_FADES: Final = 0.995  # a round in which the goal is kept


def corrected(
    observed: Observed, workers: Fleet, lately: Demand, sizing: Sizing, memory: Memory
) -> tuple[Memory, tuple[Reason, ...]]:
    """Believe measurements that say again and again that less is kept than was predicted.

    `lately`: the hardest load of the time over which was measured.
    """
    is_settled = workers.ready == workers.counted and observed.now_s - came_s(observed) >= observed.limits.stable_s
    if math.isnan(observed.attained) or not is_settled:
        return replace(memory, missed_rounds=0), ()
    if observed.attained >= sizing.goal.share:
        fades = max(1.0, memory.correction * CORRECTION_FADES)
        return replace(memory, missed_rounds=0, correction=fades), ()
    missed = observed.attained < sizing.goal.share - MISSED_BY
    if not missed or not sizing.holds(workers.ready, lately.times(memory.correction)):
        return replace(memory, missed_rounds=0), ()
    if memory.missed_rounds + 1 < MISSED_ROUNDS:
        return replace(memory, missed_rounds=memory.missed_rounds + 1), ()
    correction = min(MAX_CORRECTION, memory.correction * CORRECTION_STEP)
    words = (
        f"{observed.attained:.0%} of the requests keep the goal where {sizing.goal.share:.0%} were predicted: the load "
        f"is taken for {correction:.2f} times what it is"
    )
    return replace(memory, missed_rounds=0, correction=correction), (Reason(Why.MISSED, words),)
