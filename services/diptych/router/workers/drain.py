"""How a router leaves. It stops being ready, and whoever still reaches it is served and told to connect elsewhere.

What has not ended at the deadline ends with an error: a client's connection can't move. Only SIGTERM closes its
ports; but one of several processes leaves those that it shares at the deadline, as the others take whoever comes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.common.draining import Draining
from diptych.common.verdicts.drain import DrainProgress
from diptych.router.admission.admission import Admission
from diptych.router.workers.fleet import Fleet

ADMIN_PATHS: Final = "/admin/"  # what is below wants the operators' token, not a client's key
TOOL_PATHS: Final = ("/get_server_info", "/server_info", "/get_load", "/flush_cache", "/start_profile", "/stop_profile")
OPERATORS_PATHS: Final = (ADMIN_PATHS, *TOOL_PATHS)  # likewise: as tools of SGLang and vLLM call them
DRAIN_PATH: Final = f"{ADMIN_PATHS}drain"


class OpenRequests:
    """Implements `diptych.common.draining.Work` for a router."""

    def __init__(self, admission: Admission, fleet: Fleet, leave_ports: Callable[[], Awaitable[None]]) -> None:
        self._admission = admission
        self._fleet = fleet
        self._leave_ports = leave_ports

    @property
    def num_left(self) -> int:
        return self._admission.num_open

    @property
    def oldest_s(self) -> float:
        return self._admission.oldest_s

    async def wait_until_none(self) -> None:
        await self._admission.wait_until_idle()

    async def hand_back(self) -> None:
        self._fleet.close("the router is stopping")
        await self._leave_ports()


class RouterDrain:
    """Implements `diptych.common.draining.Drainable`."""

    def __init__(self, draining: Draining, name: str, drain_s: float) -> None:
        self._draining = draining
        self._name = name
        self._drain_s = drain_s

    def ask(self, within_s: float | None) -> None:
        self._draining.ask(self._drain_s if within_s is None else within_s)

    def progress(self) -> Mapping[str, DrainProgress]:
        return {self._name: self._draining.progress()}


class DrainableApp:
    """An application beside that of operators, who can drain it: its answers close their connections from then on."""

    def __init__(self, app: ASGIApp, draining: Draining, admin_app: ASGIApp) -> None:
        self._app = app
        self._draining = draining
        self._admin_app = admin_app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def send_and_close(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and self._draining.has_begun:
                MutableHeaders(scope=message)["connection"] = "close"
            return send(message)

        if scope["type"] == "http" and scope["path"].startswith(OPERATORS_PATHS):
            await self._admin_app(scope, receive, send)
        else:
            await self._app(scope, receive, send_and_close)
