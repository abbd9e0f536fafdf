"""Shows the metrics of all processes of a router to who asks at their shared port; at its own, those of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.router.http.operate.metrics_route import PROMETHEUS_TEXT
from diptych.router.process.metrics import PATH, ProcessMetrics
from diptych.router.process.share import Share


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
