"""Plots of simulations: how latencies are distributed, and the load over time; one line for each policy, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from diptych.common.arrays import F64
from diptych.simulator.outcome import Outcome
from diptych.simulator.report.svg import Line, Panel, svg

POINTS: Final = 400  # of a line
SHARES: Final = np.linspace(0.0, 1.0, POINTS)


def plot(outcomes: Mapping[str, Outcome], title: str) -> str:
    """Return an SVG document."""
    return svg(title, tuple(_panels(outcomes)))


def _panels(outcomes: Mapping[str, Outcome]) -> Iterator[Panel]:
    times = {
        "TTFT": {name: each.ttft_s for name, each in outcomes.items()},
        "TPOT": {name: each.tpot_s[each.output_len > 1] for name, each in outcomes.items()},
        "E2E": {name: each.last_s - each.arrival_s for name, each in outcomes.items()},
    }
    for what, by_name in times.items():
        lines = tuple(Line(name, *distribution(values)) for name, values in by_name.items())
        yield Panel(f"{what}: share of offered calls", "s", lines, is_log=True)
    first = next(iter(outcomes.values()))
    yield Panel("offered calls a second", "s", (Line("offered", *_rate(first)),))
    yield Panel("calls in flight", "s", tuple(Line(name, *_in_flight(each)) for name, each in outcomes.items()))


def distribution(values: F64) -> tuple[F64, F64]:
    """Return times, and which share of all calls took no longer: less than 1 at the end where some never came."""
    came = np.sort(values[np.isfinite(values)])
    if not len(came):
        return np.zeros(0), np.zeros(0)
    places = np.unique((SHARES * (len(came) - 1)).astype(np.int64))
    return came[places], (places + 1) / len(values)


def _rate(outcome: Outcome) -> tuple[F64, F64]:
    counts, edges = np.histogram(outcome.arrival_s, bins=max(1, min(100, len(outcome.arrival_s) // 10)))
    return (edges[:-1] + edges[1:]) / 2, counts / np.maximum(np.diff(edges), 1e-9)


def _in_flight(outcome: Outcome) -> tuple[F64, F64]:
    """Return how many had come and not ended. A call that failed was there for no time that is known."""
    served = outcome.is_served
    at_s = np.linspace(0.0, max(outcome.virtual_s, 1e-9), POINTS)
    came, ended = (np.sort(times[served]) for times in (outcome.arrival_s, outcome.last_s))
    return at_s, (np.searchsorted(came, at_s, "right") - np.searchsorted(ended, at_s, "right")).astype(np.float64)
