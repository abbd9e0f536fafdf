"""Draws the JSON lines of the GPU benchmarks: how near to its limit each row is, one picture a benchmark; of `pd.py`,
how the platforms compare.

    python bench/gpu/plots.py RESULTS.jsonl ... --to docs/images

Needs matplotlib, and says so where it is missing.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import pd_plot

Row = dict[str, Any]
NEAR: Final = 0.8  # of the limit: from there on bars are green
COLOURS: Final = ("#2a9d57", "#d98e04")


def read(paths: Iterable[Path]) -> dict[str, list[Row]]:
    """Return the rows by benchmark."""
    found: dict[str, list[Row]] = defaultdict(list)
    for path in paths:
        for line in path.read_text().splitlines():
            if line.startswith('{"bench"'):
                row = json.loads(line)
                found[row["bench"]].append(row)
    return found


def draw(bench: str, rows: Sequence[Row], path: Path) -> None:
    """Bars from 0 to the limit; what was measured is written beside each."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.28 * len(rows)))
    places, ratios = range(len(rows)), [row["ratio"] for row in rows]
    axes.barh(places, ratios, color=[COLOURS[ratio < NEAR] for ratio in ratios])
    for place, row in zip(places, rows, strict=True):
        axes.text(row["ratio"], place, f" {row['value']:g} {row['unit']}", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlim(0.0, 1.2)
    axes.set_yticks(places, [row["case"] for row in rows], fontsize=7)
    axes.set_xlabel("share of the limit that was measured in the same run")
    axes.set_title(bench)
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--to", type=Path, default=Path())
    options = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        print("no pictures: matplotlib is missing; pip install matplotlib")
        return 1
    matplotlib.use("Agg")
    options.to.mkdir(parents=True, exist_ok=True)
    for bench, rows in read(options.results).items():
        path = options.to / f"{bench.replace('/', '-')}.png"
        if bench == "gpu/pd":
            pd_plot.draw(rows, path)
        else:
            draw(bench, [row for row in rows if "ratio" in row and row["limit_is"] != "wanted"], path)
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
