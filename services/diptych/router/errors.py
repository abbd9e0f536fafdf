"""What a caller of the router can get, beyond the common tree. `code` is the word that OpenAI clients test for.

DiptychError
├── Unauthenticated             401  the API needs a key that it knows
├── PermissionDenied            403  the key is not for this
├── InvalidRequest
│   ├── ContextLengthExceeded   400  the prompt leaves no room for an output token
│   ├── PayloadTooLarge         413  the body is longer than the router reads
│   └── BodyCutOff              400  the client left before its body was complete: nobody hears it
│       └── BodyTooSlow         408  its body stopped coming, or would take too long
├── Overloaded
│   ├── RateLimited             429  a limit of the key is reached
│   └── Shed                    429  others are served in its place
├── NotFound
│   └── ModelNotFound           404  this router serves another model
├── Unavailable
│   └── AttemptsFailed          503  workers began it, and were lost or failed
└── Aborted                     499  somebody ended it by its id
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diptych.common.errors import DeadlineExceeded, DiptychError, InvalidRequest, NotFound, Overloaded, Unavailable


class Unauthenticated(DiptychError):
    """The API needs a key that it knows."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class PermissionDenied(DiptychError):
    """The key is not for this."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class RateLimited(Overloaded):
    """A limit of the key is reached."""


class Shed(Overloaded):
    """Others are served in its place, whose SLO tiers come first."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for an output token."""


class PayloadTooLarge(InvalidRequest):
    """The body is longer than the router reads."""

    http_status = 413


class UnreadableEncoding(InvalidRequest):
    """The body is compressed."""

    http_status = 415


class BodyCutOff(InvalidRequest):
    """The client left before its body was complete."""


class BodyTooSlow(BodyCutOff):
    """The client's body stopped coming, or would take too long."""

    http_status = 408


class ModelNotFound(NotFound):
    """This router serves another model."""


class AttemptsFailed(Unavailable):
    """Workers began the request, and each of them was lost or failed: it may be the request's doing."""


class Aborted(DiptychError):
    """Somebody ended the request by its id. No client repeats it by itself, as it would after 409 or 5xx."""

    http_status = 499
    grpc_status = "CANCELLED"


OK: Final = "ok"
DISCONNECTED: Final = "disconnected"
ABORTED: Final = "aborted"

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
    Aborted: ABORTED,
    DiptychError: "error",
}


def outcome_of(error: DiptychError) -> str:
    """Return the outcome of a request that ends with this error, as the metrics name it."""
    return next(_OUTCOMES[base] for base in type(error).__mro__ if base in _OUTCOMES)
