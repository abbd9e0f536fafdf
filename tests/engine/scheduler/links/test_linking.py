"""The table of a link's states: every pair of a state and a signal."""

from __future__ import annotations

import itertools

import pytest

from diptych.common.errors import InvalidTransition
from diptych.engine.scheduler.links.linking import TRANSITIONS, LinkState, Signal, next_state
from diptych.v1 import worker_pb2


@pytest.mark.parametrize(("state", "signal"), list(itertools.product(LinkState, Signal)), ids=lambda each: each.name)
def test_a_link_moves_along_the_table_and_no_other_way(state: LinkState, signal: Signal) -> None:
    if (state, signal) in TRANSITIONS:
        assert next_state(state, signal) is TRANSITIONS[state, signal]
    else:
        with pytest.raises(InvalidTransition, match=f"a link: {signal.value!r} in state {state.name}"):
            next_state(state, signal)


def test_every_open_link_can_end_and_be_tried_again() -> None:
    for state in (LinkState.CONNECTING, LinkState.TESTING, LinkState.UP):
        assert TRANSITIONS[state, Signal.CLOSED] is LinkState.DOWN
    assert TRANSITIONS[LinkState.DOWN, Signal.CONNECTED] is LinkState.CONNECTING


def test_states_are_those_of_the_protocol() -> None:
    assert {state.value for state in LinkState} == set(worker_pb2.LinkState.keys()) - {"LINK_STATE_UNSPECIFIED"}
