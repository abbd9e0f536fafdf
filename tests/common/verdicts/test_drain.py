"""How a process leaves: every phase with every signal, and what a deadline does."""

from __future__ import annotations

import itertools

import pytest

from diptych.common.errors import InvalidTransition
from diptych.common.verdicts.drain import TRANSITIONS, Drain, DrainProgress, Phase, Signal, next_phase

TABLE = {
    # phase: where each signal leads; missing: nowhere
    Phase.SERVING: {
        Signal.ASKED: Phase.DRAINING,
        Signal.HURRIED: Phase.HANDING_BACK,
        Signal.PROCESS_ENDS: Phase.GONE,
    },
    Phase.DRAINING: {
        Signal.DEADLINE_MOVED: Phase.DRAINING,
        Signal.DEADLINE_PASSED: Phase.HANDING_BACK,
        Signal.HURRIED: Phase.HANDING_BACK,
        Signal.LAST_ENDED: Phase.EMPTY,
        Signal.PROCESS_ENDS: Phase.GONE,
    },
    Phase.HANDING_BACK: {
        Signal.DEADLINE_MOVED: Phase.HANDING_BACK,
        Signal.HURRIED: Phase.HANDING_BACK,
        Signal.LAST_ENDED: Phase.EMPTY,
        Signal.PROCESS_ENDS: Phase.GONE,
    },
    Phase.EMPTY: {
        Signal.DEADLINE_MOVED: Phase.EMPTY,
        Signal.HURRIED: Phase.EMPTY,
        Signal.PROCESS_ENDS: Phase.GONE,
    },
    Phase.GONE: {Signal.DEADLINE_MOVED: Phase.GONE, Signal.HURRIED: Phase.GONE},
}


@pytest.mark.parametrize(("phase", "signal"), [*itertools.product(Phase, Signal)])
def test_every_signal_in_every_phase_leads_where_the_table_says_or_is_refused(phase: Phase, signal: Signal) -> None:
    after = TABLE[phase].get(signal)
    if after is None:
        with pytest.raises(InvalidTransition, match=signal.value):
            next_phase(phase, signal)
    else:
        assert next_phase(phase, signal) is after


def test_no_signal_leads_back() -> None:
    order = list(Phase)
    assert all(order.index(before) <= order.index(after) for (before, _), after in TRANSITIONS.items())


def test_it_is_empty_when_the_last_request_has_ended_in_time() -> None:
    drain = Drain()
    drain.ask(deadline_s=30.0)
    drain.look(29.0, none_left=False)
    assert drain.progress(29.0, 2, 9.5) == DrainProgress(Phase.DRAINING, 2, 9.5, deadline_s=1.0)
    drain.look(29.5, none_left=True)
    assert drain.phase is Phase.EMPTY


def test_what_is_left_at_the_deadline_is_handed_back() -> None:
    drain = Drain()
    drain.ask(deadline_s=30.0)
    drain.look(30.0, none_left=False)
    assert drain.progress(31.0, 1, 40.0) == DrainProgress(Phase.HANDING_BACK, 1, 40.0, deadline_s=0.0)
    drain.look(31.0, none_left=True)
    assert drain.phase is Phase.EMPTY


def test_a_deadline_moves_closer_and_never_away() -> None:
    drain = Drain()
    for deadline_s in (30.0, 60.0, 20.0):
        drain.ask(deadline_s)
    assert drain.deadline_s == 20.0
    drain.hurry(now_s=5.0)
    assert (drain.phase, drain.deadline_s) == (Phase.HANDING_BACK, 5.0)


def test_looking_changes_nothing_before_and_after() -> None:
    serving, gone = Drain(), Drain()
    gone.end()
    for drain in (serving, gone):
        drain.look(0.0, none_left=True)
    assert (serving.phase, gone.phase) == (Phase.SERVING, Phase.GONE)
