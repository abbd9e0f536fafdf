"""Draws what `pd.py` measured: latencies of the platforms side by side, and who has how much goodput where."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

CASE: Final = re.compile(r"(\S+) (\d+/\d+\S*) (TTFT|ITL|goodput) (.+)")
COLOURS: Final = ("#2a6f9d", "#d98e04", "#8a8a8a")
PANELS: Final = ("TTFT", "ITL", "goodput")
Values = Mapping[str, Mapping[str, float]]  # of a panel: by platform, by what

Figures = dict[str, dict[str, dict[str, dict[str, float]]]]  # by workload, panel, platform, what


def figures(rows: Sequence[Mapping[str, Any]]) -> Figures:
    """Sort the rows by workload and panel."""
    found: Figures = {}
    for row in rows:
        if match := CASE.fullmatch(row["case"]):
            platform, workload, panel, what = match.groups()
            if what != "p99/p50":
                found.setdefault(workload, {}).setdefault(panel, {}).setdefault(platform, {})[what] = row["value"]
    return found


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    found = figures(rows)
    figure, grid = pyplot.subplots(len(found), 3, figsize=(11, 2.4 * len(found)), squeeze=False)
    for axes, (workload, panels) in zip(grid, found.items(), strict=True):
        for one, panel in zip(axes, PANELS, strict=True):
            if panel in panels:
                (_draw_goodput if panel == "goodput" else _draw_times)(one, panels[panel])
            one.set_title(f"{workload}: {panel}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_times(axes: Any, values: Values) -> None:
    """Bars of milliseconds."""
    width = 0.8 / len(values)
    for number, (platform, times) in enumerate(sorted(values.items())):
        places = [place + number * width for place in range(len(times))]
        bars = axes.bar(places, times.values(), width, label=platform, color=COLOURS[number % len(COLOURS)])
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
        axes.set_xticks(range(len(times)), times, fontsize=8)
    axes.margins(y=0.15)
    axes.set_ylabel("ms", fontsize=8)
    axes.legend(fontsize=7)


def _draw_goodput(axes: Any, values: Values) -> None:
    """A line of text for each pair of limits, and bars of requests/s."""
    names = sorted(values)
    limits = list(values[names[0]])
    height = 0.8 / len(names)
    for number, platform in enumerate(names):
        places = [place + number * height for place in range(len(limits))]
        speeds = [values[platform].get(limit, 0.0) for limit in limits]
        axes.barh(places, speeds, height, label=platform, color=COLOURS[number % len(COLOURS)])
    axes.set_yticks(range(len(limits)), [f"TTFT {limit}".replace(", ", ", TPOT ") for limit in limits], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("requests/s", fontsize=8)
