"""Requests move beside others, in mid stream, while drafts are verified: the client reads what no worker guessed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from every_kind import Scripted
from null_runner import expected_output

from diptych.common.members.roles import LegKind, Role
from diptych.engine.values.events import AbortRoom, Move, Start
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step import Drafts
from diptych.generation.sampling_params import SamplingParams

VOCAB = 1000
NUM_TOKENS = 40
PROMPTS = {room: [room * 7 + i for i in range(5 + room)] for room in range(1, 5)}
EXPECTED = {room: expected_output(prompt, NUM_TOKENS, VOCAB) for room, prompt in PROMPTS.items()}
MOVED = (1, 2, 3)
HEIR = 100  # more than the room that a request moves from

FleetClass = Any  # the fixture's class: test helpers can't be imported


class Told(Scripted):
    """Knows how moved requests go on, too."""

    def __init__(self) -> None:
        super().__init__(EXPECTED)
        self.num_guesses = 0

    def propose(self, requests: Sequence[Request]) -> Drafts:
        drafts = super().propose(requests)
        self.num_guesses += len(drafts)
        return drafts

    def _guess(self, request: Request) -> tuple[int, ...]:
        room = request.room % HEIR
        start = request.num_tokens - len(PROMPTS[room])
        following = EXPECTED[room][start : start + 1 + (room + start) % 4]
        return tuple(token_id + ((start + i + room) % 5 == 0) for i, token_id in enumerate(following))


def moved(fleet: Any) -> dict[int, list[int]]:
    """Let requests move from worker 1; return what each had said before, of those that do."""
    worker = fleet.workers[1]
    for room in MOVED:
        worker.core.handle(Move(HEIR + room, room, 2), 0.0)
    for _ in range(6):
        fleet.deliver(1)
        if all(worker.outputs[HEIR + room] for room in MOVED):
            break
        fleet.advance(1)
    first = {room: worker.outputs[HEIR + room][0] for room in MOVED}
    said = {room: fleet.tokens(room) for room, output in first.items() if output.failure is None}
    assert all(first[room].token_ids == tuple(tokens[-1:]) for room, tokens in said.items())
    return {room: tokens[:-1] for room, tokens in said.items()}


def go_on(fleet: Any, room: int, said: Sequence[int]) -> None:
    params = SamplingParams(NUM_TOKENS - len(said), temperature=0.0, ignore_eos=True)
    tokens = np.array([*PROMPTS[room], *said], dtype=np.int64)
    request = new_request(HEIR + room, tokens, params, num_prior_output_tokens=len(said))
    fleet.workers[2].core.handle(Start(request, 1, LegKind.DECODE), 0.0)


def moving(fleet_class: FleetClass, overlap: bool, num_said: int) -> tuple[Any, Told, dict[int, list[int]]]:
    drafter = Told()
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, overlap=overlap, drafter=drafter, num_pages=128)
    for room, prompt in PROMPTS.items():
        fleet.start(room, prompt, 1, 1, max_tokens=NUM_TOKENS)
    while len(fleet.tokens(1)) < num_said:
        fleet.advance(1)
    said = moved(fleet)
    assert said, "whoever decodes can move"
    return fleet, drafter, said


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_said", range(2, 22, 2))
def test_moved_requests_go_on_behind_what_was_said(fleet_class: FleetClass, overlap: bool, num_said: int) -> None:
    fleet, drafter, said = moving(fleet_class, overlap, num_said)
    for room, tokens in said.items():
        go_on(fleet, room, tokens)
    fleet.run()
    for room, tokens in said.items():
        following = [token for output in fleet.workers[2].outputs[HEIR + room] for token in output.token_ids]
        whole = [*tokens, EXPECTED[room][len(tokens)], *following]
        assert whole == EXPECTED[room]
    assert all(fleet.tokens(room) == EXPECTED[room] for room in PROMPTS.keys() - said.keys())
    assert drafter.num_guesses > 5
    fleet.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_said", range(3, 22, 4))
def test_requests_whose_move_fails_go_on_where_they_are(fleet_class: FleetClass, overlap: bool, num_said: int) -> None:
    fleet, _, said = moving(fleet_class, overlap, num_said)
    for room in said:
        fleet.workers[1].core.handle(AbortRoom(HEIR + room, "test"), 0.0)
    fleet.run()
    assert {room: fleet.tokens(room) for room in PROMPTS} == EXPECTED
    fleet.close()
