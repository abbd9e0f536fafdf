"""Leads requests for text past the framework: its layers of middleware would touch every write of every stream."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.common.errors import InternalError
from diptych.router.http.exchange.errors import error_response
from diptych.router.http.exchange.exchange import Api, Exchange

logger = logging.getLogger(__name__)


class Shortcut:
    """An ASGI application in front of another one, which answers all that is not a POST to one of `apis`."""

    def __init__(self, app: ASGIApp, exchange: Exchange, apis: Mapping[str, Api]) -> None:
        self._app = app
        self._exchange = exchange
        self._apis = apis  # by path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = self._apis.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if api is None:
            return await self._app(scope, receive, send)
        response = await self._answer(Request(scope, receive), api)
        return await response(scope, receive, send)

    async def _answer(self, request: Request, api: Api) -> Response:
        try:
            return await self._exchange.answer(request, api)
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            error = InternalError("internal error; the router's log has the details")
            return error_response(error, {}, api.error_body)
