from __future__ import annotations

import pytest

from diptych.common.errors import DeadlineExceeded, DiptychError, InternalError, InvalidRequest, Overloaded, Unavailable
from diptych.engine.output import FailureCode
from diptych.router.failure import LegFailure
from diptych.router.worker_view import Pair, Role

PAIR = Pair(prefill_id=1, decode_id=2)

TABLE: dict[FailureCode, tuple[set[int], bool, type[DiptychError]]] = {
    # code: (whom a decode leg's report blames, retry, error in the end)
    FailureCode.INVALID: ({1, 2}, False, InvalidRequest),
    FailureCode.OVERLOADED: ({2}, True, Overloaded),
    FailureCode.PEER_LOST: ({1}, True, Unavailable),
    FailureCode.TRANSFER_FAILED: ({1, 2}, True, Unavailable),
    FailureCode.DEADLINE: ({1, 2}, False, DeadlineExceeded),
    FailureCode.ABORTED: ({1, 2}, True, Unavailable),
    FailureCode.RETRACTED: ({2}, True, Unavailable),
    FailureCode.INTERNAL: ({1, 2}, False, InternalError),
}


@pytest.mark.parametrize("code", FailureCode)
def test_each_code_says_whom_to_avoid_whether_to_retry_and_how_it_ends(code: FailureCode) -> None:
    blamed, is_retryable, error = TABLE[code]
    failure = LegFailure(Role.DECODE, code, "why")
    assert (set(failure.blamed(PAIR)), failure.is_retryable) == (blamed, is_retryable)
    assert type(failure.to_error()) is error
    assert str(failure.to_error()) == "decode: why"


def test_a_lost_session_blames_the_worker_itself() -> None:
    failure = LegFailure(Role.PREFILL, FailureCode.PEER_LOST, "lost 10.0.0.1", session_lost=True)
    assert failure.blamed(PAIR) == {1}
    assert str(failure.to_error()) == "the prefill worker was lost"  # addresses are for the log


def test_a_failure_without_words_still_names_the_worker() -> None:
    error: DiptychError = LegFailure(Role.PREFILL, FailureCode.INTERNAL, "").to_error()
    assert str(error) == "the prefill worker failed"
