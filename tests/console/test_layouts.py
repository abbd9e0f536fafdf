"""Where the parts of each view lie, wide and narrow, in both themes, beside what `layouts.toml` says of it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from browsing import NARROW, WIDE, Site
from page_layout import MEASURE, Box, Layout, faults

VIEWS: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text())
BAR: Final = {"bar": "header.bar"}
WIDTHS: Final[dict[Literal["wide", "narrow"], int]] = {"wide": WIDE, "narrow": NARROW}


def test_every_part_lies_where_it_is_written_down(site: Site) -> None:
    site.feed.platform.add("unified", "unified-0")
    site.feed.platform.weave()
    names = {card["pod"]: instance for instance, card in site.feed.platform.workers.items()}
    row = next(row for row in site.feed.platform.rows.values() if row["output_tokens"] > 20)
    row |= {"phase": "ended", "outcome": "ok", "status": 200, "num_attempts": 1}
    found = []
    for name, view in VIEWS.items():
        site.page.set_viewport_size({"width": WIDE, "height": 800})
        site.open(view["place"].format(request=row["id"], **names))
        site.page.locator(view["shows"]).first.wait_for()
        for width, pixels in WIDTHS.items():
            site.page.set_viewport_size({"width": pixels, "height": 800})
            found += [f"{name}, {width}: {words}" for words in _faults(site, view, width)]
    assert "\n".join(found) == ""


def _faults(site: Site, view: Any, width: Literal["wide", "narrow"]) -> list[str]:
    """Return what is wrong in light, and what lies elsewhere in dark."""
    parts, measured = {**BAR, **view["parts"]}, list[dict[str, Box]]()
    for scheme in ("light", "dark"):
        site.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        boxes = site.page.evaluate(MEASURE, parts)
        measured.append({name: Box(*box) for name, box in boxes.items()})
    light, dark = measured
    moved = [f"{name} moves with the theme" for name in light if light[name] != dark.get(name)]
    return [*faults(Layout(**view[width]), light, WIDTHS[width]), *moved]


LAYOUT = Layout(["title", "left right", "below"], left=["title", "below"], right=["right", "below"])
BOXES = {
    "title": Box(10, 0, 100, 20),
    "left": Box(12, 20, 150, 60),
    "right": Box(150, 30, 300, 70),
    "below": Box(10, 70, 300, 90),
}


@pytest.mark.parametrize(
    ("part", "box", "words"),
    [
        ("title", Box(10, 0, 100, 20), ""),
        ("left", Box(12, 10, 150, 60), "left is not below title"),
        ("left", Box(12, 20, 160, 60), "right is not to the right of left"),
        ("left", Box(12, 20, 150, 29), "right is not beside left"),
        ("title", Box(14, 0, 100, 20), "the left edges of title and below differ"),
        ("below", Box(10, 70, 320, 90), "below is not inside the window"),
        ("below", None, "below is not there"),
    ],
)
def test_a_part_that_lies_elsewhere_is_named(part: str, box: Box | None, words: str) -> None:
    boxes = {name: place for name, place in {**BOXES, part: box}.items() if place is not None}
    found = faults(LAYOUT, boxes, 310)
    assert found[:1] == [each for each in found if words and each.startswith(words)][:1]
    assert bool(found) == bool(words)
