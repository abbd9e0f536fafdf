"""What axe finds in the views of calls, in light; and of their colours in dark."""

from __future__ import annotations

import pytest
from browsing import Site, serious_faults
from playwright.sync_api import expect

VIEWS = {"requests": ".call", "requests/{id}": ".wf", "cache": ".rate", "charts": "canvas", "playground": ".settings"}


@pytest.mark.parametrize("view", VIEWS)
def test_no_view_of_calls_has_a_serious_fault(site: Site, view: str) -> None:
    rows = site.feed.platform.rows
    for name in list(rows)[5:]:
        del rows[name]
    name = next(iter(rows))
    rows[name] |= {"phase": "ended", "outcome": "ok", "num_attempts": 2}
    page = site.open(view.format(id=name))
    expect(page.locator(VIEWS[view]).first).to_be_visible()
    if view == "playground":
        page.get_by_label("Prompt", exact=True).fill("say: one two three four five six")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_text("ended by itself")).to_be_visible()
    assert serious_faults(page) == []
