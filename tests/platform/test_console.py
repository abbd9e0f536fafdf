"""An operator's way through the console of a real platform, in a browser: from the address that `diptych up` prints.

With `DIPTYCH_SCREENSHOTS=FOLDER` it leaves pictures of what it sees there, for the documentation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

Platform = Any  # the fixture's class: test helpers can't be imported
CHROMIUM: Final = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SYSTEM: Final = "You answer in a few words, and only what was asked. " * 12


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Every error of the page fails the test."""
    expect.set_options(timeout=120_000)  # machines may be busy
    context, errors = browser.new_context(viewport={"width": 1280, "height": 860}), list[str]()
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert errors == []


def workers(platform: Platform, role: str) -> list[str]:
    """As the page names them, who are ready."""
    cards = document(platform, "fleet")["workers"]
    return [instance for instance, card in cards.items() if card["role"] == role and card["state"] == "ready"]


def document(platform: Platform, name: str) -> Any:
    request = urllib.request.Request(f"{platform.url}/console/api/{name}", headers=dict(platform.trust().metadata()))
    with urllib.request.urlopen(request, timeout=200) as answer:
        return json.load(answer)


def chat(platform: Platform, number: int, request_id: str = "") -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"And number {number}?"}]
    headers = {"x-request-id": request_id} if request_id else {}
    status, answer = platform.post("/v1/chat/completions", {"messages": messages, "max_tokens": 24}, headers=headers)
    assert status == 200, answer


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("DIPTYCH_SCREENSHOTS"):
        page.wait_for_timeout(1_500)  # for a look at what moves
        page.screenshot(path=Path(folder, f"console-{name}.png"))


def see_one_whose_scheduler_freezes(platform: Platform, page: Page) -> None:
    """Its frontend says so, for as long as it lasts, and its card says since when."""
    (scheduler,) = platform.components("decode")[0].children()
    silent = page.locator('.panel[data-role="decode"] .worker[data-kind="bad"]')
    scheduler.suspend()  # SIGSTOP
    try:
        expect(silent).to_contain_text(re.compile(r"its scheduler has been silent for \d+ s"))
    finally:
        scheduler.resume()
    expect(page.locator('.panel[data-role="decode"] .worker[data-kind="ready"]')).to_have_count(2)


def see_one_that_freezes(platform: Platform, page: Page) -> None:
    """A worker that stands still leaves the page once its lease is over, and comes back when it wakes."""
    worker = platform.components("decode")[0]
    processes = [*worker.children(), worker]
    cards = page.locator('.panel[data-role="decode"] .worker')
    for process in processes:
        process.suspend()  # SIGSTOP
    try:
        expect(cards).to_have_count(1)
        expect(page.locator(".line")).to_have_count(2)
    finally:
        for process in processes:
            process.resume()
    expect(page.locator('.panel[data-role="decode"] .worker[data-kind="ready"]')).to_have_count(2)


def see_one_that_is_flipped(page: Page) -> None:
    """A prefill worker that becomes a decode worker goes to the other panel, which says so."""
    panel = page.locator('.panel[data-role="decode"]')
    page.locator('.panel[data-role="prefill"] .worker').last.get_by_role("link").first.click()
    page.get_by_role("button", name="Change role").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("combobox").select_option("decode")
    dialog.get_by_role("button", name="Change role").click()
    expect(panel.locator(".worker")).to_have_count(3)
    expect(panel.get_by_text("Served as prefill until a moment ago")).to_be_visible()
    expect(page.get_by_text("Its role is changed; it was prefill.")).to_be_visible()


def test_an_operator_signs_in_by_the_printed_address_and_finds_his_answers(
    start_platform: Callable[..., Platform], page: Page
) -> None:
    platform = start_platform(prefill=2, decode=2, options=("--model", "sim", "--device", "sim"))
    page.goto(f"{platform.url}/")  # without a token there is nothing to see
    expect(page.get_by_label("token")).to_be_visible()
    page.get_by_label("token").fill("not the token of this platform")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert").or_(page.get_by_role("status")).first).to_be_visible()
    expect(page.locator(".worker")).to_have_count(0)

    printed = re.search(r"console +(\S+#code=\S+)", platform.log.read_text())
    assert printed is not None
    page.goto("about:blank")  # an address that differs in its fragment alone is no new page
    page.goto(printed[1])
    expect(page.get_by_text("operator")).to_be_visible()
    assert "code" not in page.url

    cards = page.locator(".worker")  # the picture: two panels and the links between
    expect(cards).to_have_count(4)
    expect(page.locator('.panel[data-role="prefill"] .worker')).to_have_count(2)
    expect(page.locator(".line")).to_have_count(4)
    with ThreadPoolExecutor(8) as threads:
        for number in range(24):
            threads.submit(chat, platform, number)
        picture(page, "fleet")
    chat(platform, 99, "the-one")

    page.get_by_role("link", name="Requests", exact=True).click()  # why is it slow, and why did it go there?
    page.get_by_role("link", name="the-one").click()
    expect(page.get_by_role("heading", name="Where the time went")).to_be_visible()
    stages = page.locator(".wf-name")
    for stage in ("attempt", "prefill", "output"):
        expect(stages.filter(has_text=stage).first).to_be_visible()
    story = document(platform, "requests/the-one")
    assert 0.0 <= story["unnamed_s"] < story["row"]["duration_s"]  # how little it is says the machine, too
    expect(page.locator(".costs .is-chosen")).to_have_count(1)
    picture(page, "request")

    page.get_by_role("link", name="Cache", exact=True).click()  # is more cache worth it?
    expect(page.get_by_text(re.compile("More cache would gain"))).to_be_visible()
    page.get_by_role("link", name="Steps", exact=True).click()
    expect(page.locator("canvas")).to_be_visible()
    if os.environ.get("DIPTYCH_SCREENSHOTS"):
        with ThreadPoolExecutor(3) as threads:
            for number in range(100, 130):
                threads.submit(chat, platform, number)
            picture(page, "steps")

    page.get_by_role("link", name="Fleet", exact=True).click()  # what scales next, and who is gone?
    expect(page.locator('.panel[data-role="prefill"]')).to_contain_text(re.compile("worker"))
    see_one_whose_scheduler_freezes(platform, page)
    see_one_that_freezes(platform, page)
    see_one_that_is_flipped(page)
    before = workers(platform, "decode")
    platform.kill("decode")
    named = cards.filter(has_text=re.compile("|".join(instance[:6] for instance in before)))
    expect(named).to_have_count(len(before) - 1)
    expect(cards).to_have_count(4)  # `up` has started another one

    page.locator('.panel[data-role="prefill"] .worker').first.get_by_role("link").first.click()  # and he acts
    page.get_by_role("button", name="Log level").click()
    page.get_by_role("dialog").get_by_role("button", name="Log level").click()
    expect(page.get_by_text("The log level is changed; it was info.")).to_be_visible()
    page.get_by_role("button", name="Drain").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(page.get_by_text("It drains.")).to_be_visible()
