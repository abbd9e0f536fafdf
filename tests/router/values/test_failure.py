from __future__ import annotations

import pytest

from diptych.common.errors import DeadlineExceeded, DiptychError, InternalError, InvalidRequest, Overloaded, Unavailable
from diptych.common.members.roles import LegKind
from diptych.generation.output import FailureCode
from diptych.router.errors import AttemptsFailed, ContextLengthExceeded
from diptych.router.values.failure import LegFailure
from diptych.router.workers.worker_view import Pair

PAIR = Pair(prefill_id=1, decode_id=2)

TABLE: dict[FailureCode, tuple[set[int], bool, type[DiptychError]]] = {
    # code: (whom a decode leg's report blames, retry, error in the end)
    FailureCode.INVALID: ({1, 2}, False, InvalidRequest),
    FailureCode.OVERLOADED: ({2}, True, Overloaded),
    FailureCode.PEER_LOST: ({1}, True, AttemptsFailed),
    FailureCode.TRANSFER_FAILED: ({1, 2}, True, AttemptsFailed),
    FailureCode.DEADLINE: ({1, 2}, False, DeadlineExceeded),
    FailureCode.ABORTED: ({1, 2}, True, AttemptsFailed),
    FailureCode.RETRACTED: ({2}, True, Unavailable),
    FailureCode.INTERNAL: ({1, 2}, False, InternalError),
    FailureCode.HANDED_BACK: ({2}, True, Unavailable),
    FailureCode.TOO_LONG: ({1, 2}, False, ContextLengthExceeded),
}

SUSPECTS = {  # on whom a decode leg's report casts doubt; other codes on nobody
    FailureCode.PEER_LOST: (1, PAIR),
    FailureCode.TRANSFER_FAILED: (1, 2, PAIR),
    FailureCode.ABORTED: (1, 2, PAIR),
    FailureCode.INTERNAL: (2,),
}


@pytest.mark.parametrize("code", FailureCode)
def test_each_code_says_whom_to_avoid_whether_to_retry_and_how_it_ends(code: FailureCode) -> None:
    blamed, is_retryable, error = TABLE[code]
    failure = LegFailure(LegKind.DECODE, code, "why")
    assert (set(failure.blamed(PAIR)), failure.is_retryable) == (blamed, is_retryable)
    assert type(failure.to_error()) is error
    assert str(failure.to_error()) == "decode: why"


@pytest.mark.parametrize("code", FailureCode)
def test_load_deadlines_and_bad_requests_cast_doubt_on_nobody(code: FailureCode) -> None:
    assert tuple(LegFailure(LegKind.DECODE, code, "why").suspects(PAIR)) == SUSPECTS.get(code, ())


def test_doubts_fall_on_the_side_that_the_report_means() -> None:
    lost = LegFailure(LegKind.PREFILL, FailureCode.PEER_LOST, "gone")
    vanished = LegFailure(LegKind.PREFILL, FailureCode.PEER_LOST, "gone", session_lost=True)
    alone = LegFailure(LegKind.LOCAL, FailureCode.INTERNAL, "bug")
    assert [tuple(f.suspects(PAIR)) for f in (lost, vanished)] == [(2, PAIR), (1,)]
    assert alone.suspects(Pair(3, 3)) == (3,)


def test_a_lost_session_blames_the_worker_itself() -> None:
    failure = LegFailure(LegKind.PREFILL, FailureCode.PEER_LOST, "lost 10.0.0.1", session_lost=True)
    assert failure.blamed(PAIR) == {1}
    assert str(failure.to_error()) == "the prefill worker was lost"  # addresses are for the log


def test_a_local_leg_blames_its_worker() -> None:
    alone = Pair(1, 1)
    for code in (FailureCode.OVERLOADED, FailureCode.RETRACTED, FailureCode.ABORTED):
        assert LegFailure(LegKind.LOCAL, code, "").blamed(alone) == {1}
    assert LegFailure(LegKind.LOCAL, FailureCode.PEER_LOST, "", session_lost=True).blamed(alone) == {1}


def test_a_failure_without_words_still_names_the_worker() -> None:
    error: DiptychError = LegFailure(LegKind.PREFILL, FailureCode.INTERNAL, "").to_error()
    assert str(error) == "the prefill worker failed"
