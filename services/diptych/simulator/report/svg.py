"""Draws lines in panels below each other, as SVG. It knows nothing of what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from diptych.common.arrays import F64

WIDTH: Final = 860
HEIGHT: Final = 240  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 34, 34
HEAD: Final = 40
COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's
STYLE: Final = "text{font:12px sans-serif;fill:#333}.title{font-size:14px}.axis{stroke:#999}.grid{stroke:#e5e5e5}"


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One line; x rises."""

    name: str
    x: F64
    y: F64


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """Lines over one axis."""

    title: str
    unit: str  # of x
    lines: Sequence[Line]
    is_log: bool = False  # x


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where values are drawn."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, values: F64) -> F64:
        low, high = self._moved(np.array([self.low, self.high]))
        placed: F64 = self.start + (self.end - self.start) * (self._moved(values) - low) / max(high - low, 1e-12)
        return placed

    def ticks(self) -> Sequence[float]:
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            marks = (1, 2, 5) if len(powers) < 6 else (1,)
            return [mark * 10.0**p for p in powers for mark in marks if self.low <= mark * 10.0**p <= self.high]
        step = 10 ** math.floor(math.log10(max(self.high - self.low, 1e-9)))
        step /= 1 if (self.high - self.low) / step > 4 else 4
        return [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-6) + 1)]

    def _moved(self, values: F64) -> F64:
        return np.log10(np.maximum(values, self.low)) if self.is_log else values


def svg(title: str, panels: Sequence[Panel]) -> str:
    """Return a document."""
    height = HEAD + HEIGHT * len(panels)
    body = "\n".join(part for index, panel in enumerate(panels) for part in _panel(panel, HEAD + HEIGHT * index))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">\n'
        f'<title>{escape(title)}</title>\n<style>{STYLE}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>\n{body}\n</svg>\n'
    )


def _panel(panel: Panel, top: float) -> Iterator[str]:
    across, up = _scales(panel, top)
    yield f'<text x="{LEFT}" y="{top + 18}">{escape(panel.title)}</text>'
    for tick, x in zip(across.ticks(), across.at(np.array(across.ticks())).tolist(), strict=True):
        yield f'<path class="grid" d="M{x:.1f} {up.start}V{up.end}"/>'
        yield f'<text x="{x:.1f}" y="{up.start + 16}" text-anchor="middle">{tick:g} {escape(panel.unit)}</text>'
    for tick, y in zip(up.ticks(), up.at(np.array(up.ticks())).tolist(), strict=True):
        yield f'<path class="grid" d="M{across.start} {y:.1f}H{across.end}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    yield f'<path class="axis" fill="none" d="M{across.start} {up.end}V{up.start}H{across.end}"/>'
    for index, line in enumerate(panel.lines):
        yield from _line(line, across, up, index)


def _scales(panel: Panel, top: float) -> tuple[_Scale, _Scale]:
    x, y = (np.concatenate([np.zeros(0), *(getattr(line, name) for line in panel.lines)]) for name in ("x", "y"))
    high = float(x.max(initial=0.0)) or 1.0
    low = max(float(x[x > 0].min(initial=high)), high / 1e6) if panel.is_log else min(0.0, float(x.min(initial=0.0)))
    across = _Scale(low if low < high else high / 10, high, LEFT, WIDTH - RIGHT, panel.is_log)
    return across, _Scale(0.0, float(y.max(initial=0.0)) or 1.0, top + HEIGHT - BOTTOM, top + TOP)


def _line(line: Line, across: _Scale, up: _Scale, index: int) -> Iterator[str]:
    """The line itself, and its name at the right."""
    color, y = COLORS[index % len(COLORS)], up.end + 12 + 16 * index
    points = " ".join(
        f"{a:.1f},{b:.1f}" for a, b in zip(across.at(line.x).tolist(), up.at(line.y).tolist(), strict=True)
    )
    if points:
        yield f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{points}"/>'
    yield f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 9}" width="10" height="10" fill="{color}"/>'
    yield f'<text x="{WIDTH - RIGHT + 30}" y="{y}">{escape(line.name)}</text>'
