"""A path of a component's HTTP port by which operators change it: it wants the token, and answers JSON."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych.common.errors import DiptychError, InvalidRequest
from diptych.common.refusals import Refusals
from diptych.common.tokens import WORDS
from diptych.common.trust import Trust

Answer: TypeAlias = tuple[int, object]  # HTTP status, and what JSON says
Handler: TypeAlias = Callable[[Request], Awaitable[Answer]]


def operator_route(path: str, methods: Sequence[str], handler: Handler, trust: Trust, refusals: Refusals) -> Route:
    """Return the path. `handler` may raise a `DiptychError`, which becomes the answer."""

    async def answer(request: Request) -> Response:
        if refusal := trust.http_refusal(request.headers.get("authorization")):
            peer = f"{request.client.host}:{request.client.port}" if request.client else "unknown"
            refusals.note(refusal, peer, f"{request.method} {path}")
            return _json(401, {"error": WORDS[refusal]})
        try:
            return _json(*await handler(request))
        except DiptychError as error:
            return _json(error.http_status, {"error": str(error)})

    return Route(path, answer, methods=list(methods))


def seconds(request: Request, name: str) -> float | None:
    """Return a query parameter that is a number of seconds, None if it is not given. Raises `InvalidRequest`."""
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InvalidRequest(f"{name} must be a number of seconds from 0 on, not {text!r}", param=name)
    return value


def _json(status: int, body: object) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")  # infinite numbers become null
