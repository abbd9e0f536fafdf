"""Looking at the page over feeds that stand still: several at once, in windows of any size."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import uvicorn
from feed import Feed, create_app
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

WIDE: Final = 1280
NARROW: Final = 360
DASH: Final = "\u2013"


@dataclass(frozen=True)
class Site:
    """A feed that is served, and a page that looks at it."""

    feed: Feed
    url: str
    page: Page

    def open(self, view: str) -> Page:
        """Look at a view once its document is there."""
        self.page.goto(f"{self.url}/console/#/{view}")
        expect(self.page.locator("h1")).to_be_visible()
        return self.page

    def pod(self, instance: str) -> str:
        return self.feed.platform.workers[instance]["pod"]


@dataclass(frozen=True, slots=True)
class Served:
    """A feed that is served."""

    url: str
    feed: Feed

    @property
    def instances(self) -> dict[str, str]:
        """Instances by what the page calls them."""
        return {card["pod"]: instance for instance, card in self.feed.platform.workers.items()}

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/console/api/{path}") as answer:
            return json.load(answer)

    def do(self, deed: str, **arguments: str) -> None:
        """Have something done to the fleet, between two documents."""
        url = f"{self.url}/feed/{deed}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST")):
            pass


Serve = Callable[..., Served]


@dataclass(frozen=True, slots=True)
class Look:
    """How somebody looks at the page."""

    width: int = 1280
    height: int = 900
    scheme: Literal["light", "dark"] = "light"
    moves: bool = False  # animations run


class Console:
    """Opens the page in windows of their own, and keeps what goes wrong in them: refused scripts, too."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.errors: list[str] = []

    def open(self, served: Served, place: str = "", look: Look | None = None) -> Page:
        look = look or Look()
        context = self._browser.new_context(
            viewport={"width": look.width, "height": look.height},
            color_scheme=look.scheme,
            reduced_motion="no-preference" if look.moves else "reduce",
        )
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._hear)
        page.goto(f"{served.url}/console/{place}")
        return page

    def _hear(self, message: ConsoleMessage) -> None:
        """A server that answers with an error, or is gone, is not the page's fault."""
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)


@contextmanager
def serving(feed: Feed) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(feed), log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        feed.is_cut = True
        server.should_exit = True
        thread.join()
        listener.close()
