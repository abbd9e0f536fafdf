"""Makes a path by which operators change a component over HTTP: it needs a token that permits it, and answers JSON.

A member may also be called with its own token from its own host, for what it does as it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import TypedDict

from diptych.common.errors import DiptychError, InvalidRequest
from diptych.common.refusals import Refusals
from diptych.common.trust.trust import Trust
from diptych.common.verdicts.permissions import MAY_CALL, may_call_itself

Answer: TypeAlias = tuple[int, object]  # HTTP status, and what JSON says
Handler: TypeAlias = Callable[[Request], Awaitable[Answer]]


class OperatorError(TypedDict):
    """Any answer to an operator but a good one."""

    error: str


def operator_route(path: str, methods: Sequence[str], handler: Handler, trust: Trust, refusals: Refusals) -> Route:
    """Return the path. `handler` may raise a `DiptychError`, which becomes the answer."""
    assert all(f"{method} {path}" in MAY_CALL for method in methods), f"nobody may call {path}"

    async def answer(request: Request) -> Response:
        action = f"{'GET' if request.method == 'HEAD' else request.method} {path}"
        authorization = request.headers.get("authorization")
        refused = trust.http_refused(authorization, action)
        if refused and not (_is_from_here(request) and may_call_itself(trust.parties(authorization), action)):
            peer = f"{request.client.host}:{request.client.port}" if request.client else "unknown"
            refusals.note(refused.reason, peer, action)
            return _json(403 if refused.reason == "not_permitted" else 401, OperatorError(error=refused.words))
        try:
            return _json(*await handler(request))
        except DiptychError as error:
            return _json(error.http_status, OperatorError(error=str(error)))

    return Route(path, answer, methods=list(methods))


def _is_from_here(request: Request) -> bool:
    """Whether the caller has the address that it called."""
    server = request.scope.get("server")
    return bool(request.client and server and request.client.host == server[0])


def seconds(request: Request, name: str) -> float | None:
    """Return a query parameter that is a number of seconds, None if it is not given. Raises `InvalidRequest`."""
    return number(request, name, "a number of seconds")


def number(request: Request, name: str, words: str = "a number") -> float | None:
    """Return a query parameter that is a number from 0 on, None if it is not given. Raises `InvalidRequest`."""
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InvalidRequest(f"{name} must be {words} from 0 on, not {text!r}", param=name)
    return value


def _json(status: int, body: object) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")  # infinite numbers become null
