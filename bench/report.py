"""Prints what a benchmark measured: a table for people, or with `--json` one line a case.

A case is a value next to a limit that was measured in the same run, because absolute times mean nothing on a shared
machine. `ratio` is value / limit, or limit / value where lower is better: 1 is at the limit, either way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any

HEADER = ("case", "value", "unit", "ratio", "limit", "peers")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="fewer cases and repetitions: ends within 45 s on two cores"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line a case instead of a table")
    return parser


class Report:
    """Collects rows; prints the JSON lines at once, the table when closed."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._rows: list[tuple[str, ...]] = []

    def row(
        self,
        bench: str,
        case: str,
        value: float,
        unit: str,
        limit: float | None = None,
        limit_is: str = "",
        ratio: float | None = None,
        peers: Mapping[str, float] | None = None,
    ) -> None:
        """Add one measured case; `peers` holds what other implementations reach, in the same unit."""
        if self.as_json:
            line: dict[str, Any] = {"bench": bench, "case": case, "value": _digits(value), "unit": unit}
            if limit is not None:
                line |= {"limit": _digits(limit), "limit_is": limit_is}
            if ratio is not None:
                line["ratio"] = round(ratio, 3)
            print(json.dumps(line | {"peers": dict(peers or {})}), flush=True)
            return
        limit_text = f"{_digits(limit):g} {limit_is}" if limit is not None else ""
        ratio_text = f"{ratio:.2f}" if ratio is not None else ""
        peers_text = ", ".join(f"{name} {_digits(peer):g}" for name, peer in (peers or {}).items())
        self._rows.append((case, f"{_digits(value):g}", unit, ratio_text, limit_text, peers_text))

    def close(self) -> None:
        """Print the table."""
        if not self._rows:
            return
        rows = [HEADER, *self._rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        for row in rows:
            cells = [
                cell.rjust(width) if 1 <= i <= 3 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells).rstrip())
        self._rows.clear()

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _digits(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")
