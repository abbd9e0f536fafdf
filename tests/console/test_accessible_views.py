"""What axe finds in the views of calls."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from browsing import Site
from playwright.sync_api import expect

SERIOUS = ("serious", "critical")


ALL: dict[str, Any] = {"resultTypes": ["violations"]}
COLOURS = {**ALL, "runOnly": ["color-contrast"]}


@pytest.mark.parametrize(("theme", "rules"), [("light", ALL), ("dark", COLOURS)])
def test_no_view_of_calls_has_a_serious_fault(site: Site, theme: Literal["light", "dark"], rules: Any) -> None:
    site.page.emulate_media(color_scheme=theme)
    rows = site.feed.platform.rows
    for name in list(rows)[5:]:
        del rows[name]
    name = next(iter(rows))
    rows[name] |= {"phase": "ended", "outcome": "ok", "num_attempts": 2}
    views = {"requests": ".call", f"requests/{name}": ".wf", "cache": ".rate", "charts": "canvas"}
    for view, mark in {**views, "playground": ".settings"}.items():
        page = site.open(view)
        expect(page.locator(mark).first).to_be_visible()
        if view == "playground":
            page.get_by_label("Prompt", exact=True).fill("say: one two three four five six")
            page.get_by_role("button", name="Send").click()
            expect(page.get_by_text("ended by itself")).to_be_visible()
        found = Axe().run(page, options=rules).response["violations"]
        assert [(view, each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in SERIOUS] == []
