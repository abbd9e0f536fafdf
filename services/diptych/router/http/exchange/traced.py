"""Has the calls to the generation APIs followed, from the end of their headers to the end of their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Container
from functools import cache
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.router.tracing.record import NO_TRACE, EntryPoint, Trace
from diptych.router.tracing.tracer import Tracer

TRACE: Final = "diptych.trace"  # in the scope


def with_traces(app: ASGIApp, tracer: Tracer, paths: Container[str]) -> ASGIApp:
    """Return the application with calls to `paths` followed while somebody wants it."""

    def serve(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if not tracer.is_on or scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in paths:
            return app(scope, receive, send)
        return _follow(app, tracer, scope, receive, send)

    return serve


async def _follow(app: ASGIApp, tracer: Tracer, scope: Scope, receive: Receive, send: Send) -> None:
    with tracer.follow(_entry_point(scope["path"], scope["scheme"]), lambda: Headers(scope=scope)) as call:
        scope[TRACE] = call

        def note(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                call.note_status(message["status"])
            return send(message)

        await app(scope, receive, note)


def trace_of(scope: Scope) -> Trace:
    trace: Trace = scope.get(TRACE, NO_TRACE)
    return trace


@cache
def _entry_point(path: str, scheme: str) -> EntryPoint:
    """There are few: `paths` are ours, and so is the scheme."""
    attributes = {
        "http.request.method": "POST",
        "http.route": path,
        "url.path": path,
        "url.scheme": scheme,
    }
    return EntryPoint(f"POST {path}", attributes, "http.response.status_code", path)
