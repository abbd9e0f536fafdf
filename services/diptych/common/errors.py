"""Defines the root of every error that a caller of Diptych can see.

    DiptychError
    ├── InvalidRequest      the caller's mistake: change the request             400  INVALID_ARGUMENT
    ├── Forbidden           not for this caller                                  403  PERMISSION_DENIED
    ├── NotFound            no such model or instance                            404  NOT_FOUND
    ├── Conflict            not in the state that it is in                       409  FAILED_PRECONDITION
    ├── Overloaded          try again after `retry_after_s`                      429  RESOURCE_EXHAUSTED
    ├── Unavailable         nobody can serve this now; retrying may help         503  UNAVAILABLE
    ├── DeadlineExceeded    the caller's deadline passed                         504  DEADLINE_EXCEEDED
    ├── ConfigError         wrong flags, files or environment; says what to do   500  FAILED_PRECONDITION
    └── InternalError       our bug                                              500  INTERNAL

Each component derives its own errors from these; the edges (HTTP, gRPC) know only this tree.
`moved` is how state machines come to `InvalidTransition`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import ClassVar, TypeVar

P = TypeVar("P", bound=enum.Enum)
S = TypeVar("S", bound=enum.Enum)


class DiptychError(Exception):
    """An error with a place in HTTP and gRPC. `str(error)` is for people and says what to change."""

    http_status: int = 500
    grpc_status: ClassVar[str] = "INTERNAL"


class InvalidRequest(DiptychError):
    """The caller's mistake. `param` names the field at fault, where there is one."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Forbidden(DiptychError):
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class NotFound(DiptychError):
    http_status = 404
    grpc_status = "NOT_FOUND"


class Conflict(DiptychError):
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class Overloaded(DiptychError):
    """Too much work is waiting; the caller should try again after `retry_after_s` seconds."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(DiptychError):
    http_status = 503
    grpc_status = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(DiptychError):
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class ConfigError(DiptychError):
    grpc_status = "FAILED_PRECONDITION"


class InternalError(DiptychError):
    """Our bug."""


class InvalidTransition(InternalError):
    """A state machine met an event that its table has no entry for."""


def moved(table: Mapping[tuple[P, S], P], phase: P, signal: S, whose: str) -> P:
    """Return the next phase of a table; raise `InvalidTransition` where the table has no entry."""
    try:
        return table[phase, signal]
    except KeyError:
        raise InvalidTransition(f"{whose}: {signal.value!r} in phase {phase.value!r}") from None
