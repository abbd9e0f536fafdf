"""Errors in the shape that an API's clients expect; OpenAI's is {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import orjson
from starlette.responses import Response
from typing_extensions import TypedDict

from diptych.common.errors import DeadlineExceeded, DiptychError, InvalidRequest, NotFound, Overloaded, Unavailable
from diptych.router.errors import (
    BodyTooSlow,
    ContextLengthExceeded,
    ModelNotFound,
    PayloadTooLarge,
    PermissionDenied,
    Unauthenticated,
)

ErrorBody: TypeAlias = Callable[[DiptychError], Mapping[str, object]]
PlainErrorBody: TypeAlias = Callable[[int, str], Mapping[str, object]]  # of a status and words


class ErrorDetails(TypedDict):
    """What is wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Any answer but a good one."""

    error: ErrorDetails


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
    Overloaded: ("rate_limit_error", "rate_limit_exceeded"),
    Unavailable: ("server_error", "unavailable"),
    DeadlineExceeded: ("server_error", "deadline_exceeded"),
    DiptychError: ("server_error", "internal_error"),
}


def error_body(error: DiptychError) -> Error:
    """OpenAI's."""
    kind, code = next(_WORDS[base] for base in type(error).__mro__ if base in _WORDS)
    param = error.param if isinstance(error, InvalidRequest) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def error_response(
    error: DiptychError, headers: Mapping[str, str] | None = None, body: ErrorBody = error_body
) -> Response:
    return Response(
        orjson.dumps(body(error)),
        status_code=error.http_status,
        media_type="application/json",
        headers={**(headers or {}), **_what_next(error)},
    )


def plain_error_body(status: int, message: str) -> Error:
    """OpenAI's."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def plain_error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None, body: PlainErrorBody = plain_error_body
) -> Response:
    """An error that the web framework found: no such path or method."""
    words = orjson.dumps(body(status, message))
    return Response(words, status_code=status, media_type="application/json", headers=headers)


def _what_next(error: DiptychError) -> Mapping[str, str]:
    if isinstance(error, Overloaded | Unavailable):
        return {"retry-after": str(error.retry_after_s)}
    if isinstance(error, BodyTooSlow):
        return {"connection": "close"}  # where its next request would begin nobody knows
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    return {}
