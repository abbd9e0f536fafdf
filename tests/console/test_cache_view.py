"""The cache in a browser."""

from __future__ import annotations

from typing import Any

from browsing import DASH, Site
from playwright.sync_api import expect

# Two trees of pages: `a` to `d` in a row, of which `b` and `c` are read alike; `d` and `e` part behind `c`.
PREFIXES = {
    "a": ("", 16, 9, ["1"]),
    "b": ("a", 32, 5, ["1", "2"]),
    "c": ("b", 48, 5, ["2", "1"]),
    "d": ("c", 64, 3, ["1"]),
    "e": ("c", 64, 2, ["2"]),
    "z": ("gone", 16, 2, []),
}


def test_the_gain_of_more_cache_is_told_beside_the_rates_of_the_document(site: Site) -> None:
    page, state = site.open("fleet"), site.feed.platform.cache()
    page.get_by_role("link", name="Cache").click()
    assert state["hit_rate"] is not None
    assert state["ceiling"] is not None
    gain = f"More cache would gain at most {(state['ceiling'] - state['hit_rate']) * 100:.1f} points."
    expect(page.locator(".gain")).to_have_text(gain)
    expect(page.locator(".hit-rate")).to_have_text(f"{state['hit_rate'] * 100:.0f} %")
    expect(page.locator(".ceiling")).to_have_text(f"{state['ceiling'] * 100:.0f} %")
    tier = page.locator(".tiers tr", has_text="host")
    expect(tier).to_contain_text("20.8 k")
    expect(tier).to_contain_text("32 %")


def test_pages_that_are_read_alike_are_one_line_of_a_tree_that_opens(site: Site) -> None:
    names = ("parent", "num_tokens", "num_requests", "workers", "text")
    prefixes = {name: dict(zip(names, (*page, ""), strict=True)) for name, page in PREFIXES.items()}
    prefixes["e"]["text"] = "<b>You are</b>"
    state: Any = {**site.feed.platform.cache(), "prefixes": prefixes}
    site.feed.documents["cache"] = lambda: state
    page = site.open("cache")
    lines = page.locator(".prefixes tbody tr")
    expect(lines).to_have_count(3)
    expect(lines.nth(1)).to_contain_text("c 2 pages")
    expect(lines.nth(1)).to_contain_text(f"16{DASH}48")
    expect(lines.nth(2)).to_contain_text("nobody")
    lines.nth(1).get_by_role("button").press("Enter")
    expect(lines).to_have_count(5)
    expect(lines.nth(3)).to_contain_text("<b>You are</b>")
    expect(lines.nth(2).locator("td").nth(1)).to_have_text("3")
