"""Drafts in workers that serve any part of a request, and whose role changes."""

from __future__ import annotations

from typing import Any

import pytest
from every_kind import Scripted
from null_runner import expected_output

from diptych.common.members.roles import Role
from diptych.engine.values.step import Drafts

VOCAB = 1000
NUM_TOKENS = 40
PROMPTS = {room: [room * 7 + i for i in range(4 + room)] for room in range(1, 9)}
EXPECTED = {room: expected_output(prompt, NUM_TOKENS, VOCAB) for room, prompt in PROMPTS.items()}
LEGS = [(1, 2), (2, 1), (1, 1), (2, 2)]

FleetClass = Any  # the fixture's class: test helpers can't be imported


class Noted(Scripted):
    """Says how many guesses it made for whom."""

    def __init__(self) -> None:
        super().__init__(EXPECTED)
        self.rooms: set[int] = set()

    def propose(self, requests: Any) -> Drafts:
        drafts = super().propose(requests)
        self.rooms |= set(drafts)
        return drafts


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", [0, 5, 9, 14])
def test_requests_with_drafts_come_to_their_end_though_roles_change(
    fleet_class: FleetClass, overlap: bool, num_steps: int
) -> None:
    drafter = Noted()
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, overlap=overlap, drafter=drafter, num_pages=128)
    for room, prompt in PROMPTS.items():
        fleet.start(room, prompt, *LEGS[room % len(LEGS)], max_tokens=NUM_TOKENS)
    for _ in range(num_steps):
        for number in fleet.workers:
            fleet.advance(number)
    fleet.serve(1, Role.PREFILL)
    fleet.serve(2, Role.DECODE)
    fleet.run()
    assert {room: fleet.tokens(room) for room in PROMPTS} == EXPECTED
    assert drafter.rooms == set(PROMPTS)
    fleet.close()
