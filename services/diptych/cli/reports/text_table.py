"""Formats tables for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a line a row under the names of the columns; those that are empty in every row are left out."""
    listed = [tuple(row) for row in rows]
    kept = [number for number in range(len(columns)) if any(row[number] for row in listed)]
    shown = [[row[number] for number in kept] for row in (tuple(columns), *listed)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
