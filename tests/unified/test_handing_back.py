"""A unified worker that leaves hands back what it serves alone and what it shares, wherever the room is."""

from __future__ import annotations

from typing import Any

import pytest
from null_runner import expected_output

from diptych.common.members.roles import Role
from diptych.engine.values.events import HandBack
from diptych.generation.output import LEAVING

PROMPT = list(range(20))
NUM_TOKENS = 8
VOCAB = 1000


@pytest.mark.parametrize("num_moves", range(8))
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 1)])
def test_what_is_handed_back_goes_on_elsewhere_where_it_was(
    fleet_class: Any, prefill: int, decode: int, num_moves: int
) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, Role.UNIFIED)
    fleet.start(1, PROMPT, prefill, decode, NUM_TOKENS)
    for _ in range(num_moves):
        fleet.advance(1)
        fleet.advance(2)
    leaving = fleet.workers[1]
    leaving.core.handle(HandBack(1), 0.0)
    fleet.run()
    tokens = fleet.tokens(1)
    failures = [output.failure for output in leaving.outputs[1] if output.failure]
    assert failures == [LEAVING] or (failures == [] and num_moves > 0)  # too late to be handed back
    if not any(output.finish for output in fleet.workers[decode].outputs[1]):
        fleet.start(2, PROMPT + tokens, 3, 3, NUM_TOKENS - len(tokens))
        fleet.run()
        tokens += fleet.tokens(2)
    assert tokens == expected_output(PROMPT, NUM_TOKENS, VOCAB)
    assert all(worker.core.report().num_open_rooms == 0 for worker in fleet.workers.values())
