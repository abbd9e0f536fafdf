"""The outcomes of requests, as the metrics name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diptych.common.errors import DeadlineExceeded, DiptychError, InvalidRequest, NotFound, Overloaded, Unavailable
from diptych.router.errors import BodyCutOff, PermissionDenied, RateLimited, Unauthenticated

OK: Final = "ok"
DISCONNECTED: Final = "disconnected"

_OUTCOMES: Final[Mapping[type[DiptychError], str]] = {
    BodyCutOff: DISCONNECTED,
    InvalidRequest: "invalid",
    NotFound: "not_found",
    RateLimited: "rate_limited",
    Unauthenticated: "unauthenticated",
    PermissionDenied: "forbidden",
    Overloaded: "overloaded",
    Unavailable: "unavailable",
    DeadlineExceeded: "deadline",
    DiptychError: "error",
}


def outcome_of(error: DiptychError) -> str:
    return next(_OUTCOMES[base] for base in type(error).__mro__ if base in _OUTCOMES)
