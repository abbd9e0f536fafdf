"""The id of a request in headers and logs: the client's own if it is usable, else a new one."""

from __future__ import annotations

import re
import secrets
from typing import Final

from starlette.requests import Request

HEADER: Final = "x-request-id"

_USABLE: Final = re.compile(r"[!-~]{1,128}")  # printable ASCII without spaces: harmless in headers and logs


def request_id_of(request: Request) -> str:
    given = request.headers.get(HEADER, "")
    return given if _USABLE.fullmatch(given) else secrets.token_hex(12)
