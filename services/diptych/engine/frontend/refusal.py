"""What a scheduler's refusal of an admin command is to those who asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diptych.common.errors import (
    ConfigError,
    DiptychError,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from diptych.v1.admin_pb2 import AdminAnswer

_REFUSALS: Final[Mapping[str, type[DiptychError]]] = {
    error.grpc_status: error for error in (InvalidRequest, NotFound, Overloaded, Unavailable, ConfigError)
}


def accepted(answer: AdminAnswer) -> AdminAnswer:
    """Return the answer, unless it is a refusal: then raise it."""
    if answer.grpc_status:
        raise _REFUSALS.get(answer.grpc_status, InternalError)(answer.message)
    return answer
