"""The id of a request over HTTP, in a header: one that is not usable is replaced. Each answer carries it."""

from __future__ import annotations

from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from diptych.router.request_id import is_usable, new_request_id

HEADER: Final = "x-request-id"


def request_id_of(request: Request) -> str:
    given = request.headers.get(HEADER, "")
    return given if is_usable(given) else new_request_id()


def json_response(value: object, request: Request) -> Response:
    """Return a good answer."""
    return Response(orjson.dumps(value), media_type="application/json", headers={HEADER: request_id_of(request)})
