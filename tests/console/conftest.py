"""The console's page in a browser, over a feed that stands still until a test moves it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest
from browsing import Console, Host, Look, Served, Site, Window, hosting
from feed import Feed
from feed_documents import Platform
from playwright.sync_api import expect, sync_playwright

HERE: Final = Path(__file__).parent
OPENED: Final = pytest.StashKey[ExitStack]()
WINDOW: Final = pytest.StashKey[Window]()
NOW_S: Final = 1_790_000_000.0
CHROMIUM: Final = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def window(request: pytest.FixtureRequest) -> Window:
    """The one window that tests of this folder look at, as long as they come in a row."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    stash = request.config.stash
    if OPENED not in stash:
        stash[OPENED] = stack = ExitStack()
        stash[WINDOW] = stack.enter_context(opened(CHROMIUM))
    return stash[WINDOW]


@contextmanager
def opened(chromium: str) -> Iterator[Window]:
    expect.set_options(timeout=120_000)  # machines may be busy
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(timezone_id="UTC", locale="en")
        context.set_default_timeout(120_000)
        yield Window(context.new_page())
        browser.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Close the window behind the last test in a row: while it is open no other test may run an event loop."""
    yield
    if nextitem is None or HERE not in nextitem.path.parents:
        item.config.stash.setdefault(OPENED, ExitStack()).close()
        del item.config.stash[OPENED]


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    with hosting() as host:
        yield host


@pytest.fixture
def fresh(window: Window) -> Iterator[Window]:
    """The window as nobody has looked at anything; every error of the page fails the test."""
    yield window
    errors = [*window.errors]
    window.clear()
    assert errors == []


@pytest.fixture
def feed() -> Feed:
    return still(Feed(Platform(3, 3, now_s=NOW_S), history_s=1.0))


@pytest.fixture
def site(feed: Feed, host: Host, fresh: Window) -> Iterator[Site]:
    fresh.look(Look(height=800))
    with host.showing(feed) as served:
        yield Site(feed, served.url, fresh.page)


@pytest.fixture
def console(fresh: Window) -> Console:
    return Console(fresh)


@pytest.fixture
def serve(host: Host) -> Iterator[Callable[..., Served]]:
    """Serve a fleet of so many workers, which stand still until the test moves them; one a test."""
    with ExitStack() as stack:

        def start(prefill: int = 2, decode: int = 2, unified: int = 0, *, needs_token: bool = False) -> Served:
            feed = still(Feed(Platform(prefill, decode, unified), needs_token=needs_token, history_s=20.0))
            return stack.enter_context(host.showing(feed))

        yield start


def still(feed: Feed) -> Feed:
    feed.is_paused = True
    return feed
