"""A table of several values a case; with `--json`, a line for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from report import Report


class Sheet:
    """Collects a row a case; prints them when closed."""

    def __init__(
        self, report: Report, bench: str, title: str, case: str, columns: Sequence[str], hit_limit: float | None = None
    ) -> None:
        self._report = report
        self._bench = bench
        self._title = title
        self._case = case
        self._columns = columns
        self._hit_limit = hit_limit  # of one cache with all blocks
        self._rows: list[tuple[str, ...]] = []

    def add(self, name: str, values: Sequence[float]) -> None:
        if self._report.as_json:
            for column, value in zip(self._columns, values, strict=True):
                self._row(f"{self._case}/{name}/{column}", column, value)
        self._rows.append((name, *(f"{value:.3f}" for value in values)))

    def _row(self, case: str, column: str, value: float) -> None:
        limit = self._hit_limit if column == "hit rate" else None
        ratio = value / limit if limit else None
        self._report.row(self._bench, case, value, _unit(column), limit, "one cache of all blocks", ratio)

    def __enter__(self) -> Sheet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._report.as_json:
            return
        rows = [("", *self._columns), *self._rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        print(self._title)
        for row in rows:
            print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]))
        print()


def _unit(column: str) -> str:
    last = column.rsplit(" ", 1)[-1]
    return {"s": "s", "ms": "ms", "p50": "s", "p90": "s", "p99": "s"}.get(last, "share")
