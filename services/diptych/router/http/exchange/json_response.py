"""A good answer of JSON."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from diptych.router.http.exchange.request_id import HEADER, request_id_of


def json_response(value: object, request: Request) -> Response:
    return Response(orjson.dumps(value), media_type="application/json", headers={HEADER: request_id_of(request)})
