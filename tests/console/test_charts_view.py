"""The charts in a browser."""

from __future__ import annotations

from browsing import DASH, Site
from playwright.sync_api import expect


def test_charts_tell_the_newest_values_of_the_document_and_the_hour_as_a_table(site: Site) -> None:
    page, series = site.open("charts"), site.feed.platform.charts()["series"]
    expect(page.locator(".series li")).to_have_count(len(series))
    expect(page.locator(".plot canvas")).to_have_count(8)
    ttft_s = series["ttft_p50"]["values"][-1]
    assert ttft_s is not None
    expect(page.locator("[data-series=ttft_p50] b")).to_have_text(f"{ttft_s * 1000:.0f} ms")
    chart = page.locator(".chart", has_text="Time to the first token")
    chart.get_by_text("As a table").press("Enter")
    rows = chart.locator("tbody tr")
    expect(rows).to_have_count(60)
    known = [value for value in series["ttft_p95"]["values"][-12:] if value is not None]
    expect(rows.first.locator("td").nth(1)).to_have_text(f"{sum(known) / len(known) * 1000:.0f} ms")
    expect(rows.last.locator("td").first).to_have_text(DASH)


def test_all_charts_tell_the_moment_under_the_pointer(site: Site) -> None:
    page, charts = site.open("charts"), site.feed.platform.charts()
    page.locator(".plot .u-over").first.hover()
    moments = page.locator(".chart figcaption span")
    expect(moments.first).not_to_have_text("now")
    assert len(set(moments.all_inner_texts())) == 1
    middle = charts["series"]["running"]["values"][len(charts["series"]["running"]["values"]) // 2]
    shown = float(page.locator("[data-series=running] b").inner_text())
    assert middle is not None
    assert abs(shown - middle) < 2
