"""Looking at the page over feeds that stand still, one after the other, in a window of any size."""

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
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from feed import Feed, create_app
from playwright.sync_api import ConsoleMessage, Page, expect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

WIDE: Final = 1280
NARROW: Final = 360
DASH: Final = "\u2013"
BLANK: Final = "about:blank"


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

    width: int = WIDE
    height: int = 900
    scheme: Literal["light", "dark"] = "light"
    moves: bool = False  # animations run


def serious_faults(page: Page) -> list[tuple[str, str, str]]:
    """Return what axe finds, and in dark of colours alone, as nothing else differs: theme, rule and the first node."""
    found: list[tuple[str, str, str]] = []
    themes: dict[Literal["light", "dark"], Any] = {"light": {}, "dark": {"runOnly": ["color-contrast"]}}
    for scheme, options in themes.items():
        page.emulate_media(color_scheme=scheme)
        violations = Axe().run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
        faults = [each for each in violations if each["impact"] in ("serious", "critical")]
        found += [(scheme, each["id"], each["nodes"][0]["html"]) for each in faults]
    return found


class Window:
    """A page that all tests of a file look at, one after the other, and what goes wrong in it: refused scripts, too."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._hear)

    def look(self, look: Look) -> None:
        self.page.set_viewport_size({"width": look.width, "height": look.height})
        motion: Literal["no-preference", "reduce"] = "no-preference" if look.moves else "reduce"
        self.page.emulate_media(color_scheme=look.scheme, reduced_motion=motion)

    def clear(self) -> None:
        """Forget what a test has left: what is kept for the tab, and the page itself."""
        if self.page.url != BLANK:
            self.page.evaluate("() => { sessionStorage.clear(); localStorage.clear(); }")
            self.page.goto(BLANK)
        self.errors.clear()

    def _hear(self, message: ConsoleMessage) -> None:
        """A server that answers with an error, or is gone, is not the page's fault."""
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)


class Console:
    """Opens the page of a feed."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def open(self, served: Served, place: str = "", look: Look | None = None) -> Page:
        self._window.look(look or Look())
        self._window.page.goto(f"{served.url}/console/{place}")
        return self._window.page


class Host:
    """A server of one feed after the other: to start one for each would take a test as long as all the rest."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._app: ASGIApp | None = None

    @contextmanager
    def showing(self, feed: Feed) -> Iterator[Served]:
        """Serve a feed until the end of the block."""
        self._app = create_app(feed)
        try:
            yield Served(self.url, feed)
        finally:
            feed.is_cut = True
            self._app = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app or Response(status_code=503)
        await app(scope, receive, send)


@contextmanager
def hosting() -> Iterator[Host]:
    listener = socket.create_server(("127.0.0.1", 0))
    host = Host(f"http://127.0.0.1:{listener.getsockname()[1]}")
    config = uvicorn.Config(host, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield host
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
