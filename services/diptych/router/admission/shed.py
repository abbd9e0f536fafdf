"""Which share of the requests of a sheddable tier is refused, so that others are served well. Pure.

Each tier that has requests says how near it is to missing its SLO: by what a request would find that comes now, and by
what those have seen that are in flight. Nobody waits for requests to end: what ended tells how it was.

Rule: sheddable tiers give way in the order of their weights, each of them gradually, and the next one only when all of
the one before is refused. Each gives way to what is at least as heavy, itself included, and to all that is not
sheddable; so that is refused by no rule of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from diptych.generation.slo import Slo
from diptych.router.choose.policies.outlook import Outlook

FIRST_FROM: Final = 0.3  # pressure at which the lightest tier begins to give way
ALL_FROM: Final = 0.8  # and at which all sheddable ones have: the rest is for what comes in bursts
MAX_WAITED: Final = 1.0  # of one request's wait to what it may take, and
MAX_PACE: Final = 2.0  # of its pace: one alone is no crowd
FEW: Final = 3  # waiting requests


class Seen(NamedTuple):
    """What the requests of a tier have seen that are in flight: sums of their times, each as a share of its SLO."""

    num_waiting: int = 0  # without a first token
    waited: float = 0.0  # in all, beyond what their prompts take by themselves
    num_running: int = 0  # with enough tokens to have a pace
    paced: float = 0.0  # by all of them, a token


NOTHING_SEEN: Final = Seen()


def pressure(slo: Slo, outlook: Outlook, seen: Seen) -> float:
    """Return how near a tier is to missing its SLO: at 1 first tokens come as late as they may, at 0 at once.

    Who waits has waited for half of its time in the mean, so the whole is twice that. Few requests count less than
    many. A pace is meant to be near its limit, which workers make use of, and counts from there on.
    """
    expected = outlook.wait_s / slo.ttft_s if slo.ttft_s else 0.0
    waits = max(expected, 2 * seen.waited / (seen.num_waiting + FEW))
    expected = outlook.pace_s / slo.tpot_s if slo.tpot_s else 0.0
    pace = max(expected, seen.paced / (seen.num_running + 1))
    return max(waits, pace - 1 + FIRST_FROM if pace > 1 else 0.0)


def shares(slos: Mapping[str, Slo], pressures: Mapping[str, float]) -> Mapping[str, float]:
    """Return which share of each sheddable tier is refused; `pressures`: of tiers that have requests."""
    weights = sorted({slo.weight for slo in slos.values() if slo.sheddable})
    width = (ALL_FROM - FIRST_FROM) / max(1, len(weights))
    return {
        name: _ramp(_pressure_on(slo, slos, pressures), FIRST_FROM + width * weights.index(slo.weight), width)
        for name, slo in slos.items()
        if slo.sheddable
    }


def _pressure_on(slo: Slo, slos: Mapping[str, Slo], pressures: Mapping[str, float]) -> float:
    """The largest of those to which a tier gives way."""
    served_first = (
        value for name, value in pressures.items() if not slos[name].sheddable or slos[name].weight >= slo.weight
    )
    return max(served_first, default=0.0)


def _ramp(value: float, begin: float, width: float) -> float:
    return min(1.0, max(0.0, (value - begin) / width))
