"""What the failure of a leg means: whom to avoid, whether to try again, and what to tell the caller in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diptych.common.errors import DeadlineExceeded, DiptychError, InternalError, InvalidRequest, Overloaded, Unavailable
from diptych.engine.output import FailureCode
from diptych.router.worker_view import Pair, Role

# ABORTED is here because the router did not ask for it: a worker or its peer gave the request up.
RETRYABLE: Final = frozenset(
    {
        FailureCode.OVERLOADED,
        FailureCode.PEER_LOST,
        FailureCode.TRANSFER_FAILED,
        FailureCode.RETRACTED,
        FailureCode.ABORTED,
    }
)

_FINAL: Final[Mapping[FailureCode, type[DiptychError]]] = {
    FailureCode.INVALID: InvalidRequest,
    FailureCode.DEADLINE: DeadlineExceeded,
    FailureCode.INTERNAL: InternalError,
}


@dataclass(frozen=True, slots=True)
class LegFailure:
    """Why an attempt failed, as the leg in `role` said it."""

    role: Role
    code: FailureCode
    message: str
    session_lost: bool = False  # nobody said it: the worker itself went away

    @property
    def is_retryable(self) -> bool:
        return self.code in RETRYABLE

    def blamed(self, pair: Pair) -> frozenset[int]:
        """Return the instances that another attempt should avoid."""
        ids = {Role.PREFILL: pair.prefill_id, Role.DECODE: pair.decode_id}
        if self.session_lost or self.code in (FailureCode.OVERLOADED, FailureCode.RETRACTED):
            return frozenset({ids[self.role]})
        if self.code is FailureCode.PEER_LOST:
            return frozenset({ids[self.role.other]})
        return frozenset(ids.values())

    def to_error(self) -> DiptychError:
        """Return the caller's error, for when no attempt is left."""
        message = f"{self.role.value}: {self.message}" if self.message else f"the {self.role.value} worker failed"
        if self.session_lost:  # `message` names addresses, which are the log's business
            message = f"the {self.role.value} worker was lost"
        if self.code is FailureCode.OVERLOADED:
            return Overloaded(message)
        return _FINAL.get(self.code, Unavailable)(message)
