"""How far a simulation is from what was measured on a real platform that served the same calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from diptych.common.arrays import F64
from diptych.simulator.outcome import Outcome
from diptych.simulator.traces.measured import Measured

HIT_RATE: Final = "hit rate"
PERCENTILES: Final = (50, 90, 99)


class Error(NamedTuple):
    """One number, as it was and as it was simulated."""

    name: str
    measured: float
    simulated: float

    @property
    def relative(self) -> float:
        """Return by which share of the measured it is more; nan where that is nothing."""
        return self.simulated / self.measured - 1 if self.measured else np.nan


class Typical(NamedTuple):
    """By which share of what was measured a single call's time is off, up or down."""

    name: str
    median: float
    p90: float


def errors(outcome: Outcome, measured: Measured) -> Sequence[Error]:
    """Return means and percentiles of times in seconds, of calls that got them in both; and hit rates."""
    found = [
        Error(f"{name} {what}", at(was), at(simulated))
        for name, was, simulated in _times(outcome, measured)
        for what, at in (("mean", _mean), *((f"p{p}", _percentile(p)) for p in PERCENTILES))
    ]
    hit_rates = (float(each.cached_len.sum() / max(1, each.prompt_len.sum())) for each in (measured, outcome))
    return [*found, Error(HIT_RATE, *hit_rates)]


def typical(outcome: Outcome, measured: Measured) -> Sequence[Typical]:
    """Return how far single calls are off: percentiles may agree where calls do not."""
    return [
        Typical(name, *np.percentile(np.abs(simulated / was - 1), (50, 90)).tolist())
        for name, was, simulated in _times(outcome, measured)
    ]


def _times(outcome: Outcome, measured: Measured) -> Iterator[tuple[str, F64, F64]]:
    has_tpot = outcome.output_len > 1
    for name, was, simulated in (
        ("TTFT", measured.ttft_s, outcome.ttft_s),
        ("TPOT", measured.tpot_s, np.where(has_tpot, outcome.tpot_s, np.nan)),
        ("E2E", measured.e2e_s, outcome.last_s - outcome.arrival_s),
    ):
        known = (was > 0) & np.isfinite(simulated)  # nan is not above 0
        if known.any():
            yield name, was[known], simulated[known]


def _mean(values: F64) -> float:
    return float(values.mean())


def _percentile(percent: int) -> Callable[[F64], float]:
    return lambda values: float(np.percentile(values, percent))
