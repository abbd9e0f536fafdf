"""What the API's port answers to who asks for metrics: where they are, or with `--open-metrics` the metrics themselves.

They name keys and what each uses, and nobody is asked for a key there: so they belong where no client comes.

`AllMetrics` shows the metrics of all processes of a router to who asks at their shared port; at its own, those of one
process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.router.http.exchange.errors import plain_error_response
from diptych.router.http.exchange.request_id import HEADER, request_id_of
from diptych.router.metrics import RouterMetrics
from diptych.router.process.health import PATH, ProcessMetrics
from diptych.router.process.share import Share

PROMETHEUS_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
ELSEWHERE: Final = "metrics are at the health port (--health-port) of this router; --open-metrics shows them here, too"


def open_metrics_route(metrics: RouterMetrics) -> Route:
    async def show(request: Request) -> Response:
        return Response(metrics.exposition(), headers={"content-type": PROMETHEUS_TEXT})

    return Route(PATH, show)


def closed_metrics_route() -> Route:
    async def refuse(request: Request) -> Response:
        return plain_error_response(404, ELSEWHERE, {HEADER: request_id_of(request)})

    return Route(PATH, refuse)


class AllMetrics:
    """An ASGI application in front of another one."""

    def __init__(self, app: ASGIApp, metrics: ProcessMetrics, own_page: Callable[[], bytes], share: Share) -> None:
        self._app = app
        self._metrics = metrics
        self._own_page = own_page
        self._share = share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["server"][1] == self._share.own_port:
            return await self._app(scope, receive, send)
        page = await asyncio.to_thread(self._metrics.exposition, {self._share.index: self._own_page()})
        return await Response(page, headers={"content-type": PROMETHEUS_TEXT})(scope, receive, send)
