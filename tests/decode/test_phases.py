from __future__ import annotations

import itertools

import pytest

from diptych.common.errors import InvalidTransition
from diptych.decode.phases import TRANSITIONS, Phase, Signal, next_phase


@pytest.mark.parametrize(("phase", "signal"), list(itertools.product(Phase, Signal)))
def test_every_pair_moves_as_the_table_says_or_is_refused(phase: Phase, signal: Signal) -> None:
    if (phase, signal) in TRANSITIONS:
        assert next_phase(phase, signal) is TRANSITIONS[phase, signal]
    else:
        with pytest.raises(InvalidTransition, match=phase.value):
            next_phase(phase, signal)


def test_every_phase_but_the_last_leads_to_the_last() -> None:
    reaching = {Phase.DONE}
    for _ in Phase:
        reaching |= {phase for (phase, _), target in TRANSITIONS.items() if target in reaching}
    assert reaching == set(Phase)


def test_nothing_leaves_the_last_phase() -> None:
    assert not any(phase is Phase.DONE for phase, _ in TRANSITIONS)
