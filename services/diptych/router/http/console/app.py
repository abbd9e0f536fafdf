"""The application below `/console`, and the way there from the address alone. Every answer carries what browsers heed.

The policy for contents lets nothing run, look or load but what comes from here, and no page may frame this one. There
is no word for pages of other origins, whatever `--cors-origins` says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Final

import orjson
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.common.trust.operator_route import OperatorError
from diptych.router.http.console.page_files import PageFile, file_answer

ROOT: Final = "/console"
PATHS: Final = f"{ROOT}/"
HTML: Final = "text/html"
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": (
        "default-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def with_console(app: ASGIApp, console: ASGIApp) -> ASGIApp:
    """Return `app` with the console below its path; browsers that ask for the address alone are led there."""

    def serve(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path = scope["path"] if scope["type"] == "http" else ""
        leads_there = path == ROOT or path.startswith(PATHS) or (path == "/" and _is_browser(scope))
        return (console if leads_there else app)(scope, receive, send)

    return serve


def console_app(files: Mapping[str, PageFile], routes: Sequence[BaseRoute]) -> ASGIApp:
    """Return the page's files, and beside them what is asked for at `routes`."""

    async def show(request: Request) -> Response:
        file = files.get(request.path_params["path"])
        if file is None:
            raise HTTPException(404)
        return file_answer(file, request)

    own = [Route("/", _lead), Route(ROOT, _lead), *routes, Route(f"{PATHS}{{path:path}}", show)]
    return _with_headers(Starlette(routes=own, exception_handlers={HTTPException: _framework_error}))


def _with_headers(app: ASGIApp) -> ASGIApp:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await app(scope, receive, send_with_headers)

    return serve


def _is_browser(scope: Scope) -> bool:
    """Whether somebody wants a page: programs ask for JSON, or for anything."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    return any(name == b"accept" and HTML.encode() in value for name, value in scope["headers"])


async def _lead(request: Request) -> Response:
    """From both paths it is the same relative one, which holds behind a gateway with a prefix, too."""
    return Response(status_code=303, headers={"location": "console/", "vary": "accept"})


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body: OperatorError = {"error": f"{request.method} {request.url.path}: {error.detail}"}
    headers = {**(error.headers or {}), "cache-control": "no-store"}
    return Response(orjson.dumps(body), error.status_code, headers, "application/json")
