"""What a second of others counts, beside one of the request that a pair is chosen for: by the SLOs of both. Pure.

Whoever is delayed loses of what it can spare: an output of the time that its SLO allows a token, less the pace that it
has; a prompt of the time to its first token. On the clock a second is a second; as a share of what each can spare it is
not. As for a request's own seconds (`policies.cost`), the geometric mean of both counts. Weights are an operator's
word, and count in full.

Rule: where all have one SLO, or nobody said any, each second of others counts one of one's own.
"""

from __future__ import annotations

import math
from typing import Final

from diptych.generation.slo import MIN_SPARE, Slo
from diptych.router.workers.worker_view import WorkerLoad

UNSAID_TTFT_S: Final = 10.0  # what can be spared where nobody said an SLO, but others did
UNSAID_TPOT_S: Final = 1.0
MAX_STAKE: Final = 16.0  # nobody counts for more than so many, nor for less than one of so many


def outputs_at_stake(load: WorkerLoad, slo: Slo, num_outputs: int, pace_s: float) -> float:
    """Return how many outputs like the request's own those of a worker count for; `pace_s`: of each token there.

    Only those of this router are known by their SLOs: others count one each.
    """
    if not load.outputs:
        return num_outputs
    slo = slo.coarse
    known, num_known, own = 0.0, 0, math.sqrt(_spare(slo, pace_s)) / slo.weight
    for other, count in load.outputs:
        num_known += count
        known += count if other == slo else count * _bounded(own * other.weight / math.sqrt(_spare(other, pace_s)))
    return known + max(0, num_outputs - num_known)


def urgency(slo: Slo) -> float:
    """Return what a second before the first token counts, in a measure of its own."""
    return slo.weight / math.sqrt(slo.ttft_s or UNSAID_TTFT_S)


def prompts_stake(usual_urgency: float, slo: Slo) -> float:
    """Return what a second counts of a prompt that comes later, as they come lately; 0: nobody said an SLO lately."""
    return _bounded(usual_urgency / urgency(slo)) if usual_urgency else 1.0


def _spare(slo: Slo, pace_s: float) -> float:
    allowed_s = slo.tpot_s or UNSAID_TPOT_S
    spare_s, least_s = allowed_s - pace_s, MIN_SPARE * allowed_s
    return spare_s if spare_s > least_s else least_s  # quicker than `max`


def _bounded(stake: float) -> float:
    return min(MAX_STAKE, max(1 / MAX_STAKE, stake))
