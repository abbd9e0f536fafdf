"""The id of a request over HTTP, in a header: one that is not usable is replaced."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from diptych.router.request import is_usable, new_request_id

HEADER: Final = "x-request-id"


def request_id_of(request: Request) -> str:
    given = request.headers.get(HEADER, "")
    return given if is_usable(given) else new_request_id()
