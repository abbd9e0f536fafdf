"""The live stream: server-sent events for one viewer, from the moment it looks until it leaves or the router does."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.common.errors import InvalidRequest
from diptych.router.console.hub import Hub
from diptych.router.console.viewer import Viewer
from diptych.router.http.exchange.disconnect import until_disconnect

TOPICS: Final = ("fleet", "requests", "cache", "charts", "steps")
HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


class LiveStream(Response):
    """Sends a viewer's events while they come. No word to `Response`: its own body and headers are not sent."""

    def __init__(self, hub: Hub, viewer: Viewer) -> None:
        self._hub = hub
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(send))
        finally:
            self._hub.leave(self._viewer)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        while events := await self._viewer.receive():
            await send({"type": "http.response.body", "body": events, "more_body": True})
            await asyncio.sleep(0)  # others have their turn before the next steps are read
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def live_stream(hub: Hub, request: Request) -> Response:
    """Return the stream that is asked for. Raises `InvalidRequest`, `Unavailable`."""
    topics = wanted_topics(request.query_params.get("topics"))
    if request.method == "HEAD":
        return Response(headers={name.decode(): value.decode() for name, value in HEADERS})
    return LiveStream(hub, hub.join(topics))


def wanted_topics(text: str | None) -> frozenset[str]:
    """Return the topics of a list; without one, the fleet. Raises `InvalidRequest`."""
    topics = frozenset((text or "fleet").split(","))
    if unknown := sorted(topics - {*TOPICS}):
        raise InvalidRequest(f"there is no topic {unknown[0]!r}: there are {', '.join(TOPICS)}", param="topics")
    return topics
