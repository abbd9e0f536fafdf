"""Errors in the shape that Anthropic's clients expect: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from diptych.common.errors import DiptychError

_KINDS: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error_body(error: DiptychError) -> dict[str, Any]:
    kind = _KINDS.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
