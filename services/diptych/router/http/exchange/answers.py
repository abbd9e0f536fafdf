"""Answers of one JSON object: good ones, and errors in the shape that an API's clients expect.

Each carries the id of its request in a header: the client's own, or a new one where that is not usable. Of errors,
OpenAI's shape is {"error": {"message", "type", "param", "code"}}, Anthropic's {"type": "error", "error": {"type",
"message"}}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import orjson
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from diptych.common.errors import (
    Conflict,
    DeadlineExceeded,
    DiptychError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from diptych.router.errors import (
    Aborted,
    BodyTooSlow,
    ContextLengthExceeded,
    ModelNotFound,
    PayloadTooLarge,
    PermissionDenied,
    Unauthenticated,
)
from diptych.router.values.request import is_usable, new_request_id

HEADER: Final = "x-request-id"
ANTHROPIC_PATH: Final = "/v1/messages"  # and what is below


class ErrorDetails(TypedDict):
    """What is wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Any answer but a good one."""

    error: ErrorDetails


class AnthropicErrorDetails(TypedDict):
    """What is wrong."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """Any answer but a good one."""

    type: Literal["error"]
    error: AnthropicErrorDetails


class NotServed(InvalidRequest):
    """There is no such path or method: the web framework found it."""

    def __init__(self, http_status: int, message: str) -> None:
        super().__init__(message)
        self.http_status = http_status


# The most derived class of an error that is listed here counts: its (type, code).
_WORDS: Final[Mapping[type[DiptychError], tuple[str, str | None]]] = {
    Unauthenticated: ("invalid_request_error", "invalid_api_key"),
    PermissionDenied: ("invalid_request_error", "insufficient_permissions"),
    ContextLengthExceeded: ("invalid_request_error", "context_length_exceeded"),
    PayloadTooLarge: ("invalid_request_error", "payload_too_large"),
    BodyTooSlow: ("invalid_request_error", "request_timeout"),
    InvalidRequest: ("invalid_request_error", None),
    ModelNotFound: ("invalid_request_error", "model_not_found"),
    NotFound: ("invalid_request_error", "not_found"),
    Conflict: ("invalid_request_error", "conflict"),
    Overloaded: ("rate_limit_error", "rate_limit_exceeded"),
    Unavailable: ("server_error", "unavailable"),
    DeadlineExceeded: ("server_error", "deadline_exceeded"),
    Aborted: ("invalid_request_error", "request_aborted"),
    DiptychError: ("server_error", "internal_error"),
}

_KINDS: Final[Mapping[int, str]] = {  # Anthropic's, by status
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def request_id_of(headers: Mapping[str, str]) -> str:
    given = headers.get(HEADER, "")
    return given if is_usable(given) else new_request_id()


def json_response(value: object, request: Request) -> Response:
    """Return a good answer."""
    return Response(
        orjson.dumps(value), media_type="application/json", headers={HEADER: request_id_of(request.headers)}
    )


def refusal(error: DiptychError, request: Request, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as the answer."""
    return error_response(error, request.scope["path"], {**(headers or {}), HEADER: request_id_of(request.headers)})


def error_response(error: DiptychError, path: str, headers: Mapping[str, str]) -> Response:
    return Response(
        orjson.dumps(error_body(error, path)),
        status_code=error.http_status,
        media_type="application/json",
        headers={**headers, **_what_next(error)},
    )


def error_body(error: DiptychError, path: str) -> Error | AnthropicError:
    """Return the error in the shape that clients expect who ask there."""
    if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
        return {"type": "error", "error": {"type": _KINDS.get(error.http_status, "api_error"), "message": str(error)}}
    kind, code = next(_WORDS[base] for base in type(error).__mro__ if base in _WORDS)
    param = error.param if isinstance(error, InvalidRequest) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def _what_next(error: DiptychError) -> Mapping[str, str]:
    if isinstance(error, Overloaded | Unavailable):
        return {"retry-after": str(error.retry_after_s)}
    if isinstance(error, BodyTooSlow):
        return {"connection": "close"}  # where its next request would begin nobody knows
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    return {}
