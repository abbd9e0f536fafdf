"""Draws how a server served a load: latencies by share of calls, and what went on over time. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from diptych.cli.load.served import Served, in_flight
from diptych.common.arrays import F64
from diptych.simulator.report.plot import distribution
from diptych.simulator.report.svg import Line, Panel, svg

BINS: Final = 60


def chart(calls: Sequence[Served], title: str) -> str:
    """Return an SVG document."""
    served = [call for call in calls if call.is_good]
    named = {
        "TTFT": [call.ttft_s for call in calls],
        "TPOT": [call.tpot_s for call in calls if not math.isnan(call.tpot_s)],
        "ITL": [gap for call in served for gap in call.gaps_s],
        "E2E": [call.e2e_s for call in calls],
    }
    panels = [
        Panel(f"{name}: share of all", "s", (Line(name, *distribution(np.array(values))),), is_log=True)
        for name, values in named.items()
        if values
    ]
    panels.append(Panel("calls in flight", "s", (Line("in flight", *in_flight(calls)),)))
    panels.append(Panel("events with text a second", "s", (Line("events", *_rate(served)),)))
    return svg(title, tuple(panels))


def _rate(served: Sequence[Served]) -> tuple[F64, F64]:
    stamps = np.array([stamp for call in served for stamp in call.stamps_s])
    if not len(stamps):
        return np.zeros(0), np.zeros(0)
    counts, edges = np.histogram(stamps, bins=BINS)
    return (edges[:-1] + edges[1:]) / 2, counts / np.maximum(np.diff(edges), 1e-9)
