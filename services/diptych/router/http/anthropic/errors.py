"""Errors in the shape that Anthropic's clients expect: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from typing_extensions import TypedDict

from diptych.common.errors import DiptychError

PATH: Final = "/v1/messages"  # and what is below

_KINDS: Final[Mapping[int, str]] = {
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
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetails(TypedDict):
    """What is wrong."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """Any answer but a good one."""

    type: Literal["error"]
    error: AnthropicErrorDetails


def is_anthropic(path: str) -> bool:
    """Tell whether clients who ask there expect this shape."""
    return path == PATH or path.startswith(f"{PATH}/")


def anthropic_error_body(error: DiptychError) -> AnthropicError:
    return plain_anthropic_body(error.http_status, str(error))


def plain_anthropic_body(status: int, message: str) -> AnthropicError:
    return {"type": "error", "error": {"type": _KINDS.get(status, "api_error"), "message": message}}
