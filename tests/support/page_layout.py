"""Where the parts of a page lie, compared with what is written down of it: order, lines, overlaps, edges. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

SLACK_PX: Final = 1.0  # by which lines may differ, and boxes touch

MEASURE: Final = """selectors => {
  const found = {};
  for (const [name, selector] of Object.entries(selectors)) {
    const box = document.querySelector(selector)?.getBoundingClientRect();
    if (box?.width && box?.height) found[name] = [box.left, box.top + scrollY, box.right, box.bottom + scrollY];
  }
  return found;
}"""  # in a browser: the boxes, by name, of what is there


class Box(NamedTuple):
    """Where a part lies, in pixels of the page."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Layout:
    """What is written down: rows from the top down, and parts that begin, or end, at one line."""

    rows: Sequence[str]  # of names with spaces between, from left to right
    left: Sequence[str] = ()
    right: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        return [name for row in self.rows for name in row.split()]


def faults(layout: Layout, boxes: Mapping[str, Box], width: float) -> list[str]:
    """Return in words what is not as it is written down, in a window of such a width."""
    missing = [f"{name} is not there" for name in layout.names if name not in boxes]
    return missing or [
        *(f"{name} is not inside the window: {boxes[name]}" for name in layout.names if _is_out(boxes[name], width)),
        *_of_order(layout, boxes),
        *_of_lines("left", [(name, boxes[name].left) for name in layout.left]),
        *_of_lines("right", [(name, boxes[name].right) for name in layout.right]),
    ]


def _is_out(box: Box, width: float) -> bool:
    return box.left < -SLACK_PX or box.right > width + SLACK_PX


def _of_order(layout: Layout, boxes: Mapping[str, Box]) -> Iterator[str]:
    rows = [row.split() for row in layout.rows]
    for row in rows:
        for name, after in itertools.pairwise(row):
            if boxes[after].left < boxes[name].right - SLACK_PX:
                yield f"{after} is not to the right of {name}: {boxes[after]}, {boxes[name]}"
            if min(boxes[after].bottom, boxes[name].bottom) <= max(boxes[after].top, boxes[name].top):
                yield f"{after} is not beside {name}: {boxes[after]}, {boxes[name]}"
    for row, below in itertools.pairwise(rows):
        for name, under in itertools.product(row, below):
            if boxes[under].top < boxes[name].bottom - SLACK_PX:
                yield f"{under} is not below {name}: {boxes[under]}, {boxes[name]}"


def _of_lines(edge: str, places: Sequence[tuple[str, float]]) -> Iterator[str]:
    for (name, place), (after, other) in itertools.pairwise(places):
        if abs(place - other) > SLACK_PX:
            yield f"the {edge} edges of {name} and {after} differ: {place:g}, {other:g}"
