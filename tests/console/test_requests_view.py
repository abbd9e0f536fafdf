"""The list of requests in a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from browsing import NARROW, Site
from playwright.sync_api import Page, expect


def _ids(page: Page) -> list[str]:
    return page.locator(".call .c-id").all_inner_texts()


def _newest_first(site: Site) -> list[Any]:
    return sorted(site.feed.platform.rows.values(), key=lambda row: -row["arrived_unix_s"])


def test_the_list_shows_the_numbers_of_the_document_with_the_newest_call_first(site: Site) -> None:
    page, rows = site.open("requests"), _newest_first(site)
    expect(page.locator(".calls")).to_have_attribute("aria-rowcount", str(len(rows) + 1))
    shown = _ids(page)
    assert shown == [row["id"] for row in rows][: len(shown)]
    outputs = page.locator(".call .c-output").all_inner_texts()
    assert outputs == [str(row["output_tokens"]) for row in rows][: len(shown)]
    running = sum(row["phase"] != "ended" for row in rows)
    expect(page.locator(".lead")).to_contain_text(f"{running} running, {len(rows) - running} ended")


FILTERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "tenant": ("atl", lambda row: row["tenant"] == "atlas"),
    "adapter": ("sql", lambda row: row["adapter"] == "sql"),
    "slow_s": ("5", lambda row: row["duration_s"] > 5),
    "phase": ("running", lambda row: row["phase"] != "ended"),
    "outcome": ("failed", lambda row: row["outcome"] not in ("", "ok")),
}


def test_a_filter_leaves_the_calls_that_pass_it(site: Site) -> None:
    page = site.open("requests")
    for name, (value, passes) in FILTERS.items():
        control = page.locator(f".filters [name={name}]")
        if name in ("phase", "outcome"):
            control.select_option(value)
        else:
            control.fill(value)
        expected = [row["id"] for row in _newest_first(site) if passes(row)]
        expect(page.locator(".calls")).to_have_attribute("aria-rowcount", str(len(expected) + 1))
        assert 0 < len(expected) < len(site.feed.platform.rows)
        shown = _ids(page)
        assert shown == expected[: len(shown)]
        page.get_by_role("button", name="Clear").click()


def test_a_column_sorts_one_way_and_then_the_other(site: Site) -> None:
    page = site.open("requests")
    header = page.get_by_role("columnheader", name="Duration")
    durations = sorted(row["duration_s"] for row in site.feed.platform.rows.values())
    for order, expected in (("descending", durations[-1]), ("ascending", durations[0])):
        header.get_by_role("button").click()
        expect(header).to_have_attribute("aria-sort", order)
        first = site.feed.platform.rows[_ids(page)[0]]
        assert first["duration_s"] == expected


def test_a_list_that_is_read_stays_where_it_is_and_tells_of_new_calls(site: Site) -> None:
    page = site.open("requests")
    page.locator(".call").nth(3).hover()
    before = _ids(page)
    name = site.feed.platform.serve_chat()
    expect(page.get_by_role("button", name="show 1 new")).to_be_visible()
    assert _ids(page) == before
    page.get_by_role("button", name="show 1 new").click()
    expect(page.locator(".call .c-id").first).to_have_text(name)
    page.locator(".call a").nth(3).focus()
    site.feed.platform.serve_chat()
    expect(page.get_by_role("button", name="show 1 new")).to_be_visible()
    assert _ids(page)[0] == name


def test_slow_calls_are_named_in_words(site: Site) -> None:
    for row in site.feed.platform.rows.values():
        row |= {"phase": "ended", "outcome": "ok", "ttft_s": 0.4, "duration_s": 2.0, "output_tokens": 40}
    slow = next(iter(site.feed.platform.rows.values()))
    slow |= {"ttft_s": 1.3, "arrived_unix_s": slow["arrived_unix_s"] + 1000}
    page = site.open("requests")
    expect(page.locator(".tag.slow")).to_have_text(["slow first token"])
    expect(page.locator(".call").first).to_contain_text("slow first token")


def test_a_thousand_calls_are_a_window_of_rows(site: Site) -> None:
    platform = site.feed.platform
    while len(platform.rows) < 1000:
        platform._arrive(platform.now_s - 100 - len(platform.rows))
    page, last = site.open("requests"), _newest_first(site)[-1]
    expect(page.locator(".calls")).to_have_attribute("aria-rowcount", "1001")
    assert page.locator(".call").count() < 100
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    expect(page.locator(".call").last).to_contain_text(last["id"])
    assert page.locator(".call").count() < 100


def test_calls_are_cards_on_a_phone_and_open_by_their_link(site: Site) -> None:
    site.page.set_viewport_size({"width": NARROW, "height": 700})
    page, first = site.open("requests"), _newest_first(site)[0]
    expect(page.locator(".call").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == NARROW
    page.locator(".call .c-where").first.click()
    expect(page.locator("h1")).to_contain_text(first["id"])
    assert page.evaluate("document.documentElement.scrollWidth") == NARROW
