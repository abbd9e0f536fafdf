"""One request in a browser: its waterfall and its explanation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import Site
from feed_stories import UNNAMED_S
from playwright.sync_api import Page, expect

Json = dict[str, Any]


def _call(site: Site, num_attempts: int = 1) -> Json:
    """A call that ended, with all that one may have."""
    row: Any = next(row for row in site.feed.platform.rows.values() if row["output_tokens"] > 20)
    row |= {"phase": "ended", "outcome": "ok", "status": 200, "num_attempts": num_attempts}
    return dict(row)


def _all(bars: list[Json]) -> Iterator[Json]:
    for bar in bars:
        yield bar
        yield from _all(bar["parts"])


def _open(site: Site, row: Json) -> Page:
    page = site.open(f"requests/{row['id']}")
    expect(page.locator(".wf")).to_be_visible()
    return page


def test_every_bar_is_as_wide_as_its_stage_is_long_and_tokens_are_ticks(site: Site) -> None:
    row = _call(site)
    page, story = _open(site, row), site.feed.platform.story(row["id"])
    assert story is not None
    bars = list(_all([dict(bar) for bar in story["bars"]]))
    lines = page.locator(".wf-table tbody tr:not(.wf-unnamed, .wf-tokens)")
    assert lines.locator(":is(.fold, .leaf)").all_inner_texts() == [bar["name"] for bar in bars]
    track = page.locator(".wf-track").first.bounding_box()
    assert track is not None
    scale = track["width"] / row["duration_s"]
    for index, bar in enumerate(bars):
        box = lines.nth(index).locator(".wf-bar").bounding_box()
        assert box is not None
        assert box["width"] == pytest.approx(max(2, bar["duration_s"] * scale), abs=1)
        assert box["x"] - track["x"] == pytest.approx(bar["begun_s"] * scale, abs=1)
    expect(page.locator(".wf-unnamed")).to_contain_text(f"{UNNAMED_S * 1e6:.0f} µs")
    assert page.locator(".wf-unnamed .wf-bar").count() == 1
    expect(page.locator(".wf-tokens td.num").last).to_have_text(str(row["output_tokens"]))
    ticks = page.locator(".wf-ticks path").get_attribute("d")
    assert ticks is not None
    assert ticks.count("M") == row["output_tokens"]


def test_stages_that_come_again_and_again_are_one_line_with_all_their_bars(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = _call(site)
    story: Any = site.feed.platform.story(row["id"])
    output = story["bars"][-2]["parts"].pop()
    slice_s = output["duration_s"] / 20
    for index in range(20):
        begun_s = output["begun_s"] + index * slice_s
        story["bars"][-2]["parts"] += [
            {**output, "begun_s": begun_s, "duration_s": slice_s / 2},
            {**output, "name": "write", "begun_s": begun_s + slice_s / 2, "duration_s": slice_s / 2, "where": "router"},
        ]
    monkeypatch.setattr(site.feed.platform, "story", lambda _: story)
    page = _open(site, row)
    line = page.locator("tr", has=page.get_by_text("write", exact=True))
    expect(line).to_contain_text("20 times waiting for the client")
    expect(line.locator(".wf-bar")).to_have_count(20)
    shown = float(line.locator("td.num").last.inner_text().removesuffix(" ms"))
    assert shown == pytest.approx(output["duration_s"] / 2 * 1000, abs=1)


def test_the_waterfall_zooms_to_the_first_token_and_back_by_keys(site: Site) -> None:
    row = _call(site)
    page = _open(site, row)
    queue = page.locator("tr", has=page.get_by_text("prefill_compute", exact=True)).locator(".wf-bar")
    before = queue.bounding_box()
    page.get_by_role("button", name="To the first token").click()
    after = queue.bounding_box()
    assert before is not None
    assert after is not None
    assert after["width"] == pytest.approx(before["width"] * row["duration_s"] / (row["ttft_s"] * 1.04), rel=0.02)
    page.keyboard.press("0")
    expect(page.locator(".wf-range")).to_contain_text("all")


def test_the_chosen_pair_is_marked_in_a_table_by_total_cost(site: Site) -> None:
    row = _call(site)
    page, story = _open(site, row), site.feed.platform.story(row["id"])
    assert story is not None
    assert story["explanation"] is not None
    attempt = story["explanation"]["requests"][0]["attempts"][0]
    assert page.locator(".costs tbody tr").count() == len(attempt["pairs"])
    chosen = page.locator(".costs .is-chosen")
    expect(chosen).to_contain_text(f"{site.pod(row['prefill'])} → {site.pod(row['decode'])}")
    expect(chosen.locator(".tag")).to_have_text("chosen")
    cost = next(pair for pair in attempt["pairs"] if pair["decode_instance"] == row["decode"])
    expect(chosen.locator(".total_s")).to_have_text(_seconds(cost["total_s"]))
    expect(page.locator(".attempt")).to_contain_text("expected to finish first")
    real = f"First token expected after {_seconds(attempt['predicted_ttft_s'])}, came after {_seconds(row['ttft_s'])}"
    expect(page.locator(".attempt")).to_contain_text(real)


def _seconds(value: float | None) -> str:
    assert value is not None
    if value >= 0.9995:
        return f"{value:.2f} s"
    return f"{value * 1000:.{max(0, 3 - len(str(int(value * 1000))))}f} ms"


def test_a_failed_attempt_is_told_in_words_wherever_it_shows(site: Site) -> None:
    page = _open(site, _call(site, num_attempts=2))
    expect(page.locator(".wf-table .is-failure .tag")).to_have_text("failed")
    expect(page.locator(".wf-name", has_text="retry")).to_be_visible()
    expect(page.locator(".attempt.is-failure")).to_contain_text("the worker is gone")
    expect(page.locator(".lead")).to_contain_text("a failed attempt")


def test_the_download_is_a_trace_with_the_durations_of_the_bars(site: Site) -> None:
    row = _call(site)
    page, story = _open(site, row), site.feed.platform.story(row["id"])
    assert story is not None
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Download for Perfetto").click()
    trace = json.loads(downloading.value.path().read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    bars = _all([dict(bar) for bar in story["bars"]])
    assert [(event["name"], event["dur"]) for event in events] == [
        (bar["name"], round(bar["duration_s"] * 1e6)) for bar in bars
    ]
    assert trace["otherData"]["trace_id"] == story["trace_id"]


def test_a_call_that_runs_is_asked_for_again_and_one_that_nobody_knows_is_told_in_words(site: Site) -> None:
    name = site.feed.platform.serve_chat()
    page = site.open(f"requests/{name}")
    expect(page.get_by_text("still running")).to_be_visible()
    site.feed.platform.rows[name] |= {"phase": "ended", "outcome": "ok", "status": 200}
    expect(page.get_by_text("ok, status 200")).to_be_visible()
    expect(page.get_by_text("still running")).not_to_be_visible()
    site.open("requests/never")
    expect(page.get_by_role("status").get_by_text("No router knows this request")).to_be_visible()


def test_why_it_is_slow_and_why_it_went_there_are_two_clicks_away(site: Site) -> None:
    page = site.open("fleet")
    page.get_by_role("link", name="Requests").click()
    page.locator(".call.ended a").first.click()
    expect(page.locator(".lead")).to_contain_text("The first token took")
    expect(page.get_by_role("heading", name="Why it went there")).to_be_attached()
