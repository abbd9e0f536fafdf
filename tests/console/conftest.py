"""The console's page in a browser, over a feed that stands still until a test moves it."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import pytest
import uvicorn
from browsing import WIDE, Console, Served, Site, serving
from feed import Feed, create_app
from feed_documents import Platform
from playwright.sync_api import Browser, expect, sync_playwright

NOW_S: Final = 1_790_000_000.0
CHROMIUM: Final = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")  # not longer: meanwhile no other test of the process may run an event loop
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    expect.set_options(timeout=20_000)  # machines may be busy
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def feed() -> Feed:
    feed = Feed(Platform(3, 3, now_s=NOW_S), history_s=1.0)
    feed.is_paused = True
    return feed


@pytest.fixture
def url(feed: Feed) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(feed), log_level="error"))
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    serving.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    feed.is_cut = True
    server.should_exit = True
    serving.join()
    listener.close()


@pytest.fixture
def site(feed: Feed, url: str, browser: Browser) -> Iterator[Site]:
    """Every error of the page fails the test."""
    context = browser.new_context(viewport={"width": WIDE, "height": 800}, timezone_id="UTC", locale="en")
    context.set_default_timeout(10_000)
    page, errors = context.new_page(), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield Site(feed, url, page)
    context.close()
    assert errors == []


@pytest.fixture
def console(browser: Browser) -> Iterator[Console]:
    """Every error of a page fails the test."""
    console = Console(browser)
    yield console
    for context in browser.contexts:
        context.close()
    assert console.errors == []


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Serve fleets of so many workers, which stand still until the test moves them."""
    with ExitStack() as stack:

        def start(prefill: int = 2, decode: int = 2, unified: int = 0, *, needs_token: bool = False) -> Served:
            feed = Feed(Platform(prefill, decode, unified), needs_token=needs_token, history_s=20.0)
            feed.is_paused = True
            return Served(stack.enter_context(serving(feed)), feed)

        yield start
