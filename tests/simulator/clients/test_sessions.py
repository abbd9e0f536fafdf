"""Clients in virtual time that open sessions and wait in line for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from diptych.common.members.roles import Role
from diptych.simulator.outcome import Outcome
from diptych.simulator.run import simulate
from diptych.simulator.setup import Expectation, RouterSetup, Setup, WorkerSetup
from diptych.simulator.traces.call import Call, names_of
from diptych.simulator.traces.closed_loop import closed_loop

PAGE = 64
OUTPUT = 4


def turn(arrival_s: float, session: str, stream: int, num_blocks: int) -> Call:
    blocks = names_of(1000 * stream + np.arange(num_blocks))
    return Call(arrival_s, 512 * num_blocks, OUTPUT, blocks, session=session)


CALLS = closed_loop([
    turn(0.0, "a", 1, 4),
    turn(1.0, "b", 2, 4),
    turn(2.0, "", 3, 4),
    turn(8.0, "a", 1, 6),
    turn(9.0, "b", 2, 6),
])  # fmt: skip
A1, B1, NOBODYS, A2, B2 = range(5)


def served(num_tokens: int, expectation: Expectation, calls: Sequence[Call] = CALLS) -> Outcome:
    """Return what becomes of the calls where pools hold so many tokens."""
    worker = WorkerSetup(num_pages=num_tokens // PAGE, page_size=PAGE)
    workers = (replace(worker, role=Role.PREFILL), replace(worker, role=Role.DECODE))
    outcome = simulate(Setup(workers, sessions=expectation, context_len=512 * 7), calls)
    assert set(outcome.failure) == {""}
    return outcome


def test_a_session_that_does_not_fit_waits_for_the_end_of_another_and_nobody_else_does() -> None:
    outcome = served(512 * 10, Expectation.EXACT)
    assert outcome.arrival_s[B1] == 1.0  # its time in line counts
    assert outcome.first_s[B1] > outcome.last_s[A2]
    assert outcome.first_s[NOBODYS] < 3.0
    assert outcome.last_s[B2] > outcome.first_s[B1]


@pytest.mark.parametrize("num_blocks", [13, 20])
def test_sessions_that_fit_do_not_wait(num_blocks: int) -> None:
    outcome = served(512 * num_blocks, Expectation.EXACT)
    assert outcome.first_s[B1] < 2.0


def test_who_expects_the_most_waits_until_it_is_known_that_the_others_have_less() -> None:
    outcome = served(512 * 13 + PAGE, Expectation.LONGEST)  # one at its most, and one half as large again as it is
    assert outcome.last_s[A1] < outcome.first_s[B1] < outcome.arrival_s[A2]


def test_no_deadline_counts_the_time_in_line() -> None:
    made = [replace(call, gap_s=700.0) if call.session == "a" and call.gap_s > 0 else call for call in CALLS]
    outcome = served(512 * 10, Expectation.EXACT, made)
    assert outcome.ttft_s[B1] > RouterSetup().silence_s


def test_without_sessions_all_is_as_it_was() -> None:
    none = served(512 * 10, Expectation.NONE)
    assert none.first_s[B1] < 2.0
