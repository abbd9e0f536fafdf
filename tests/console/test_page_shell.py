"""The page around the views: signing in, being cut off, its size."""

from __future__ import annotations

import gzip
import re
from typing import Final

from browsing import Console, Serve
from feed import CODE, STATIC
from playwright.sync_api import expect

MOST_BYTES: Final = 150_000


def test_a_code_in_the_address_signs_in_and_is_taken_out_of_it(console: Console, serve: Serve) -> None:
    served = serve(needs_token=True)
    page = console.open(served, f"#code={CODE}")
    expect(page.locator(".worker")).to_have_count(4)
    assert CODE not in page.url
    expect(page.get_by_text("operator", exact=False).first).to_be_visible()
    page.reload()
    expect(page.locator(".worker")).to_have_count(4)


def test_who_has_no_token_sees_nothing_and_a_wrong_one_is_told(console: Console, serve: Serve) -> None:
    page = console.open(serve(needs_token=True))
    page.get_by_label("Token").fill("guess")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("does not know this token")
    assert page.locator(".worker").count() == 0
    page.get_by_label("Token").fill("viewer")
    page.keyboard.press("Enter")
    expect(page.locator(".worker")).to_have_count(4)


def test_a_viewer_is_offered_no_acts(console: Console, serve: Serve) -> None:
    served = serve(needs_token=True)
    page = console.open(served)
    page.get_by_label("Token").fill("viewer")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="prefill-0", exact=True).click()
    expect(page.locator(".drawer .fact-list").first).to_be_visible()
    assert page.get_by_role("button", name="Drain").count() == 0


def test_a_stream_that_breaks_is_taken_up_again(console: Console, serve: Serve) -> None:
    served = serve()
    page = console.open(served)
    expect(page.locator(".connection")).to_have_attribute("data-state", "live")
    served.do("cut")
    expect(page.locator(".connection")).to_have_attribute("data-state", "retrying")
    expect(page.locator(".worker")).to_have_count(4)
    served.do("kill", instance=served.instances["decode-1"])
    served.do("mend")
    expect(page.locator(".connection")).to_have_attribute("data-state", "live")
    expect(page.locator(".worker")).to_have_count(3)


def test_the_theme_is_chosen_and_kept(console: Console, serve: Serve) -> None:
    page = console.open(serve())
    for scheme in ("light", "dark"):
        page.get_by_role("button", name=re.compile("Colours")).click()
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == scheme
    page.reload()
    expect(page.locator(".worker").first).to_be_visible()
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


def test_the_first_view_is_small_and_asks_nobody_else(console: Console, serve: Serve) -> None:
    served = serve()
    page = console.open(served)
    expect(page.locator(".worker")).to_have_count(4)
    loaded: list[str] = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(url.startswith(f"{served.url}/console/") for url in loaded)
    paths = {url.split("/console/")[1].partition("?")[0] for url in loaded if "/console/api/" not in url}
    assert sum((STATIC / path).stat().st_size for path in {"index.html", *paths}) <= MOST_BYTES


def test_all_of_the_page_is_small_as_it_is_sent() -> None:
    files = [path for path in STATIC.rglob("*") if path.suffix in (".html", ".css", ".js")]
    assert sum(len(gzip.compress(path.read_bytes(), mtime=0)) for path in files) <= MOST_BYTES
