"""Holds what a simulation says against what was measured of the same calls: errors of times, and order of setups.

A configuration is one load on one setup of workers. Of each metric two figures of a configuration count: the median
and the 90th percentile over its calls. The error of a figure is |simulated - measured| / measured; what a simulator is
for is to put configurations in the right order, so agreement in order stands beside the errors. Calls that either side
did not serve are counted, and left out of the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

METRICS: Final = ("ttft", "tpot", "whole")
QUANTILES: Final[Mapping[str, float]] = {"p50": 0.5, "p90": 0.9}


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """What became of the calls of one configuration: `[num_calls]`, seconds; nan: the call was not served."""

    ttft: F64  # from arrival to the first token
    tpot: F64  # for each token after the first; nan where there is none
    whole: F64  # from arrival to the last token

    @staticmethod
    def of(arrival_s: F64, first_s: F64, last_s: F64, output_len: F64) -> Times:
        """`output_len`: tokens; with fewer than two there is no time per token."""
        gaps = np.where(output_len > 1, output_len - 1, np.nan)
        return Times(first_s - arrival_s, (last_s - first_s) / gaps, last_s - arrival_s)


class Figure(NamedTuple):
    """One metric of one configuration."""

    configuration: str
    metric: str  # of METRICS
    quantile: str  # of QUANTILES
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Return it with its sign: above 0 the simulation is too slow."""
        return (self.simulated_s - self.measured_s) / self.measured_s


class Errors(NamedTuple):
    """How far a metric was off, over all configurations and both quantiles."""

    median: float
    p90: float
    bias: float  # median with signs
    order: float  # share of pairs of configurations that are in the right order, by both quantiles
    num_pairs: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """How well a simulation does."""

    figures: Sequence[Figure]
    num_unserved: tuple[int, int]  # calls, measured and simulated

    def errors(self, metric: str) -> Errors:
        """Return those of a metric. Raises `KeyError` for one that nothing is known of."""
        chosen = [figure for figure in self.figures if figure.metric == metric]
        if not chosen:
            raise KeyError(metric)
        signed = np.array([figure.error for figure in chosen])
        median, p90 = np.quantile(np.abs(signed), (0.5, 0.9)).tolist()
        right = [agreed for name in QUANTILES for agreed in _orders([f for f in chosen if f.quantile == name])]
        return Errors(median, p90, float(np.median(signed)), sum(right) / len(right) if right else 1.0, len(right))


def compare(measured: Mapping[str, Times], simulated: Mapping[str, Times]) -> Comparison:
    """Compare configurations by name; calls are in the same order on both sides."""
    figures, unserved = [], np.zeros(2, np.int64)
    for name in measured:
        one, other = measured[name], simulated[name]
        unserved += np.isnan(one.whole).sum(), np.isnan(other.whole).sum()
        for metric in METRICS:
            figures += _figures(name, metric, getattr(one, metric), getattr(other, metric))
    num_measured, num_simulated = unserved.tolist()
    return Comparison(figures, (num_measured, num_simulated))


def _figures(name: str, metric: str, measured: F64, simulated: F64) -> list[Figure]:
    both = ~np.isnan(measured) & ~np.isnan(simulated)
    if not both.any():
        return []
    return [
        Figure(name, metric, quantile, *(float(np.quantile(each[both], share)) for each in (measured, simulated)))
        for quantile, share in QUANTILES.items()
    ]


def _orders(figures: Sequence[Figure]) -> list[bool]:
    """Return of each pair that measures tell apart whether the simulation has it in the same order."""
    return [
        (one.measured_s < other.measured_s) == (one.simulated_s < other.simulated_s)
        and one.simulated_s != other.simulated_s
        for one, other in combinations(figures, 2)
        if one.measured_s != other.measured_s
    ]
