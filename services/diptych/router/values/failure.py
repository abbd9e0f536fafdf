"""What the failure of a leg means: whom to avoid, whether to try again, and what to tell the caller in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from diptych.common.errors import DeadlineExceeded, DiptychError, InternalError, InvalidRequest, Overloaded, Unavailable
from diptych.common.members.roles import LegKind
from diptych.generation.output import FailureCode
from diptych.router.choose.breakers import Suspect, suspects_of
from diptych.router.errors import AttemptsFailed, ContextLengthExceeded
from diptych.router.workers.worker_view import Pair

# ABORTED is here because the router did not ask for it: a worker or its peer gave the request up.
RETRYABLE: Final = frozenset(
    {
        FailureCode.OVERLOADED,
        FailureCode.PEER_LOST,
        FailureCode.TRANSFER_FAILED,
        FailureCode.RETRACTED,
        FailureCode.ABORTED,
        FailureCode.HANDED_BACK,
    }
)

_ITS_OWN: Final = frozenset({FailureCode.OVERLOADED, FailureCode.RETRACTED, FailureCode.HANDED_BACK})  # nobody else's

_ANYBODYS: Final = frozenset({FailureCode.TRANSFER_FAILED, FailureCode.ABORTED})  # either side's, or the link's

_FINAL: Final[Mapping[FailureCode, type[DiptychError]]] = {
    FailureCode.INVALID: InvalidRequest,
    FailureCode.DEADLINE: DeadlineExceeded,
    FailureCode.INTERNAL: InternalError,
    FailureCode.TOO_LONG: ContextLengthExceeded,
    FailureCode.PEER_LOST: AttemptsFailed,
    FailureCode.TRANSFER_FAILED: AttemptsFailed,
    FailureCode.ABORTED: AttemptsFailed,
}


@dataclass(frozen=True, slots=True)
class LegFailure:
    """Why an attempt failed, as one of its legs said it."""

    leg: LegKind
    code: FailureCode
    message: str
    session_lost: bool = False  # nobody said it: the worker itself went away

    @property
    def is_retryable(self) -> bool:
        return self.code in RETRYABLE

    @property
    def is_handed_back(self) -> bool:
        """The worker is leaving: nobody failed."""
        return self.code is FailureCode.HANDED_BACK

    def blamed(self, pair: Pair) -> frozenset[int]:
        """Return the instances that another attempt should avoid."""
        both = frozenset({pair.prefill_id, pair.decode_id})
        own = frozenset({pair.prefill_id if self.leg is LegKind.PREFILL else pair.decode_id})
        if self.session_lost or self.code in _ITS_OWN:
            return own
        if self.code is FailureCode.PEER_LOST:
            return both - own
        return both

    def suspects(self, pair: Pair) -> Sequence[Suspect]:
        """Return on whom the failure casts doubt; nobody, where there is none: load, a deadline, a bad request."""
        prefills = self.leg is not LegKind.DECODE
        own, peer = (pair.prefill_id, pair.decode_id) if prefills else (pair.decode_id, pair.prefill_id)
        if self.session_lost or self.code is FailureCode.INTERNAL:
            return (own,)
        if self.code is FailureCode.PEER_LOST:
            return (peer, pair)
        return suspects_of(pair) if self.code in _ANYBODYS else ()

    def to_error(self) -> DiptychError:
        """Return the caller's error, for when no attempt is left."""
        message = f"{self.leg.value}: {self.message}" if self.message else f"the {self.leg.value} worker failed"
        if self.session_lost:  # `message` names addresses, which are the log's business
            return AttemptsFailed(f"the {self.leg.value} worker was lost")
        if self.code is FailureCode.OVERLOADED:
            return Overloaded(message)
        return _FINAL.get(self.code, Unavailable)(message)
