"""States of recurrent layers on workers that do both: they take turns, give each other pages, and give up."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from every_kind import Scripted
from fleet_games import change_roles, give_up_a_step, grant_to_each_other
from null_runner import NullRunner
from recurrent_runner import RecurrentRunner, expected_output, new_states
from stepped_engine import Engine

from diptych.common.members.roles import Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.scheduler.stepping import StepGivenUp
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.unified.reserve import max_tokens

VOCAB, PAGE, PER_STATE = 1000, 4, 2
PROMPT = list(range(20))
expected = partial(expected_output, vocab_size=VOCAB, num_cells=PER_STATE * PAGE)
FleetClass = Any  # the fixture's class: test helpers can't be imported


def new_fleet(
    fleet_class: FleetClass, *roles: Role, num_pages: int = 64, per_state: int = PER_STATE, **others: Any
) -> Any:
    def model(num_pages: int) -> tuple[Any, RecurrentRunner]:
        kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
        return kv, RecurrentRunner(NullRunner(kv, VOCAB), kv, new_states(8, per_state * PAGE), VOCAB)

    return fleet_class(*roles, num_pages=num_pages, model=model, pages_per_state=per_state, **others)


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_go_both_ways_and_stay_on_one_worker(fleet_class: FleetClass, overlap: bool) -> None:
    fleet = new_fleet(fleet_class, Role.UNIFIED, Role.UNIFIED, overlap=overlap)
    prompts = {room: [*PROMPT[: 7 + room], room] for room in range(1, 10)}
    for room, prompt in prompts.items():
        fleet.start(room, prompt, 1 + room % 2, 1 + room % 3 % 2)
    fleet.run()
    assert {room: fleet.tokens(room) for room in prompts} == {
        room: expected(prompt, 5) for room, prompt in prompts.items()
    }
    fleet.close()


@pytest.mark.parametrize("per_state", [PER_STATE, 4])
@pytest.mark.parametrize("num_pages", [24, 25, 33])
def test_two_workers_whose_pools_are_granted_to_each_other_come_to_an_end(
    fleet_class: FleetClass, num_pages: int, per_state: int
) -> None:
    """A prompt needs room for its states, too: what is granted must leave that. The first two are as long as can be."""
    fleet = new_fleet(fleet_class, Role.UNIFIED, Role.UNIFIED, num_pages=num_pages, per_state=per_state)
    prompts = grant_to_each_other(fleet)
    assert {room: fleet.tokens(room) for room in prompts} == {
        room: expected_output(prompt, 2, VOCAB, per_state * PAGE) for room, prompt in prompts.items()
    }


def test_a_unified_worker_takes_what_leaves_room_for_one_more_and_for_the_states_of_both() -> None:
    cache = KvCache(num_pages=20, page_size=4, max_requests=2, max_tokens_per_request=256, pages_per_state=3)
    assert max_tokens(Role.DECODE, 256, cache) == (19 - 2 * 3) * 4
    assert max_tokens(Role.UNIFIED, 256, cache) == (19 - 3 * 3) // 2 * 4


@pytest.mark.parametrize(
    "order", [(Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL), (Role.LOCAL, Role.UNIFIED)]
)
@pytest.mark.parametrize("num_moves", [0, 2, 5])
def test_what_began_before_a_change_of_roles_ends_right(
    fleet_class: FleetClass, order: tuple[Role, Role], num_moves: int
) -> None:
    fleet = new_fleet(fleet_class, Role.UNIFIED, Role.UNIFIED)
    prompts = change_roles(fleet, PROMPT, order, num_moves)
    assert all(fleet.tokens(room) == expected(prompt, 5) for room, prompt in prompts.items())


def test_guesses_are_right_though_requests_begin_alike_and_roles_change(fleet_class: FleetClass) -> None:
    """States that others begin with are of prompts, so no guess is in them; those that are handed over, too."""
    prompts = {room: [*PROMPT[: 12 + room % 3], *[room] * (room % 2)] for room in range(1, 9)}
    told = {room: expected(prompt, 30) for room, prompt in prompts.items()}
    fleet = new_fleet(fleet_class, Role.UNIFIED, Role.UNIFIED, num_pages=128, overlap=True, drafter=Scripted(told))
    for room, prompt in prompts.items():
        fleet.start(room, prompt, 1 + room % 2, 1 + room // 2 % 2, max_tokens=30)
        for number in fleet.workers:
            fleet.advance(number)
    fleet.serve(1, Role.PREFILL)
    fleet.serve(2, Role.DECODE)
    fleet.run()
    assert {room: fleet.tokens(room) for room in prompts} == told
    fleet.close()


class HalfStep:
    """Runs half of a step: some of its KV is there, and wrong, and states are further than anybody knows."""

    def __init__(self, worker: Any, states: Any) -> None:
        self._worker = worker
        self._states = states
        self.rooms: set[int] = set()

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        assert batch.states is not None
        self.rooms = set(self._worker.core.rooms_of_step())
        self._worker.kv.flat[batch.out_slots] = 13
        self._worker.kv[batch.states.written_pages] = 13
        self._states[batch.states.slots] = 13
        raise StepGivenUp


@pytest.mark.parametrize("num_moves", range(6))
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 1)])
def test_a_step_that_is_given_up_never_happened(
    fleet_class: FleetClass, prefill: int, decode: int, num_moves: int
) -> None:
    fleet = new_fleet(fleet_class, Role.UNIFIED, Role.UNIFIED)
    prompts = give_up_a_step(
        fleet, PROMPT, (prefill, decode), num_moves, lambda worker: HalfStep(worker, worker.stepping._runner._states)
    )
    assert all(fleet.tokens(room) == expected(prompt, 5) for room, prompt in prompts.items())
    assert all(
        other.core.report().num_open_rooms == 0 and other.cache.audit(other.core.report().holders) == []
        for other in fleet.workers.values()
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_hundreds_of_requests_that_begin_alike_are_right_on_one_worker_with_a_tiny_pool(
    overlap: bool, seed: int
) -> None:
    """They are aborted at any moment, and retracted; a request goes on from outputs of others, too."""
    engine = Engine(26, overlap=overlap, pages_per_state=PER_STATE, max_step_tokens=11)
    rng, asked = random.Random(seed), {}
    heads = [[7] * 9, [7] * 22, [8] * 12]
    for room in range(1, 160):
        prompt = [*rng.choice(heads), *(rng.randrange(VOCAB) for _ in range(rng.randrange(9)))]
        asked[room] = prompt, rng.choice([1, 2, 5, 30])
        engine.start(room, *asked[room])
        if rng.random() < 0.1:
            heads[rng.randrange(3)] = [*prompt, *expected(prompt, 2)][-25:]
        for _ in range(rng.randrange(12)):
            engine.step()
        if rng.random() < 0.2:
            engine.abort(rng.randrange(max(1, room - 5), room + 1))
    engine.run()
    ended = 0
    for room, (prompt, num_wanted) in asked.items():
        tokens = engine.tokens(room)
        assert tokens == expected(prompt, len(tokens)), room
        ended += len(tokens) == num_wanted
    assert ended > 90
    assert engine.core.report().counts.retractions > 0
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_conversation_of_many_turns_is_served_up_to_the_longest_request_that_fits(overlap: bool) -> None:
    """Each turn leaves a state: those of turns before must not keep the next one out."""
    engine = Engine(40, overlap=overlap, pages_per_state=PER_STATE)
    text: list[int] = []
    for room in range(1, 100):
        prompt = [*text, room, room, room]
        if len(prompt) + 2 > engine.core.max_tokens:
            break
        engine.start(room, prompt, 2)
        engine.run()
        assert engine.tokens(room) == expected(prompt, 2)
        text = [*prompt, *engine.tokens(room)]
    assert len(text) + 6 > engine.core.max_tokens == (39 - 2 * PER_STATE) * PAGE
    engine.close()
