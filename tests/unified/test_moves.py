"""A request that runs goes on at another worker: its KV is sent, and nothing of it is computed again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from null_runner import NullRunner, expected_output
from recurrent_runner import RecurrentRunner, new_states
from windowed_runner import WindowedRunner
from windowed_runner import expected_output as expected_with_windows

from diptych.common.members.roles import LegKind, Role
from diptych.engine.schedule.adapter_turns import AdapterTurns
from diptych.engine.values.events import AbortRoom, HandBack, Move, PeerDown, Start, WriterGone
from diptych.engine.values.request import new_request
from diptych.engine.values.window_pages import WindowPages
from diptych.generation.output import FailureCode
from diptych.generation.sampling_params import SamplingParams

Fleet = Any  # the fixture's class: test helpers can't be imported

VOCAB = 1000
PAGE = 4
OLD, NEW = 1, 2  # rooms, and workers
OTHER = 5  # a room
PROMPT = list(range(1, 12))
MAX_TOKENS = 40
RIGHT = expected_output(PROMPT, MAX_TOKENS, VOCAB)


def moving(fleet: Fleet, num_tokens: int) -> Fleet:
    """Have the request of room OLD run at worker OLD until it has so many tokens, and then asked to move."""
    fleet.start(OLD, PROMPT, OLD, OLD, MAX_TOKENS)
    while len(fleet.tokens(OLD)) < num_tokens:
        fleet.advance(OLD)
    fleet.workers[OLD].core.handle(Move(NEW, OLD, NEW), 0.0)
    return fleet


def held(fleet: Fleet) -> list[int]:
    """Wait until the request stands still; return its tokens, of which the last is told in the new room."""
    for _ in range(5):
        fleet.deliver(OLD)
        if fleet.workers[OLD].outputs[NEW]:
            break
        fleet.advance(OLD)
    tokens: list[int] = fleet.tokens(OLD)
    (output,) = fleet.workers[OLD].outputs[NEW]
    assert (output.first_index, output.token_ids) == (0, (tokens[-1],))
    return tokens


def start_at_new(fleet: Fleet, tokens: list[int], room: int = NEW) -> None:
    """Start the rest of the request at its new worker, as a replay of all but the newest token."""
    known = tokens[:-1]
    params = SamplingParams(max_tokens=MAX_TOKENS - len(known), temperature=0.0, ignore_eos=True)
    prompt = np.array(PROMPT + known, dtype=np.int64)
    request = new_request(room, prompt, params, num_prior_output_tokens=len(known))
    fleet.workers[NEW].core.handle(Start(request, OLD, LegKind.DECODE), 0.0)


def new_tokens(fleet: Fleet, room: int = NEW) -> dict[int, int]:
    """Output index in the new room -> token, of the new worker."""
    outputs = fleet.workers[NEW].outputs[room]
    return {output.first_index + i: token for output in outputs for i, token in enumerate(output.token_ids)}


def ending(fleet: Fleet, worker: int, room: int) -> Any:
    return fleet.workers[worker].outputs[room][-1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("role", [Role.DECODE, Role.UNIFIED])
@pytest.mark.parametrize("num_tokens", [2, 5, 6, 17])
def test_the_new_worker_goes_on_behind_the_last_token_and_every_page_came(
    fleet_class: type[Fleet], num_tokens: int, role: Role, overlap: bool
) -> None:
    fleet = moving(fleet_class(Role.UNIFIED, role, overlap=overlap), num_tokens)
    tokens = held(fleet)
    start_at_new(fleet, tokens)
    fleet.run()
    rest = new_tokens(fleet)
    assert [rest[index] for index in sorted(rest)] == RIGHT[len(tokens) :]
    assert min(rest) == 1, "token 0 is the old worker's"
    assert tokens == RIGHT[: len(tokens)], "the old worker gives no token more"
    assert ending(fleet, OLD, OLD).failure.code is FailureCode.HANDED_BACK
    sent, received = ending(fleet, OLD, NEW).stats, ending(fleet, NEW, NEW).stats
    num_pages = -(-(len(PROMPT) + len(tokens) - 1) // PAGE)
    assert (sent.pages_moved, received.pages_moved, received.cached_tokens) == (num_pages, num_pages, 0)
    assert sent.kv_digest == received.kv_digest
    assert_clean(fleet)


@pytest.mark.parametrize("windows", [WindowPages(1, 5), WindowPages(2, 3), WindowPages(2, 8, is_chunked=True)])
@pytest.mark.parametrize("num_tokens", [2, 5, 6, 9])
def test_layers_with_a_window_send_what_is_live_behind_the_newest_token(
    fleet_class: type[Fleet], windows: WindowPages, num_tokens: int
) -> None:
    def model(num_pages: int) -> tuple[Any, WindowedRunner]:
        kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
        return kv, WindowedRunner(NullRunner(kv, VOCAB), kv, windows, VOCAB)

    right = expected_with_windows(PROMPT, MAX_TOKENS, VOCAB, windows)
    fleet = moving(fleet_class(Role.UNIFIED, Role.UNIFIED, model=model, windows=windows, num_pages=128), num_tokens)
    tokens = held(fleet)
    start_at_new(fleet, tokens)
    fleet.run()
    rest = new_tokens(fleet)
    assert tokens == right[: len(tokens)]
    assert tokens + [rest[index] for index in sorted(rest)] == right
    assert_clean(fleet)


def test_pages_that_the_new_worker_has_are_not_sent(fleet_class: type[Fleet]) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    fleet.start(9, PROMPT, NEW, NEW, 8)
    fleet.run()
    tokens = held(moving(fleet, 6))
    start_at_new(fleet, tokens)
    fleet.run()
    received = ending(fleet, NEW, NEW).stats
    assert received.cached_tokens == 12, "the last of its 16 tokens is sent in any case"
    assert received.pages_moved == 1
    assert tokens + list(dict(sorted(new_tokens(fleet).items())).values()) == RIGHT
    assert_clean(fleet)


def test_a_request_moves_on_and_back(fleet_class: type[Fleet]) -> None:
    """It is back where its prompt is cached: only what it has got since is sent."""
    fleet = moving(fleet_class(Role.UNIFIED, Role.UNIFIED), 5)
    tokens = held(fleet)
    start_at_new(fleet, tokens)
    while len(new_tokens(fleet)) < 7:
        fleet.advance(OLD)
        fleet.advance(NEW)
    fleet.workers[NEW].core.handle(Move(3, NEW, OLD), 0.0)
    while not fleet.workers[NEW].outputs[3]:
        fleet.advance(NEW)
    tokens += [token for _, token in sorted(new_tokens(fleet).items())]
    params = SamplingParams(max_tokens=MAX_TOKENS - len(tokens) + 1, temperature=0.0, ignore_eos=True)
    request = new_request(3, np.array(PROMPT + tokens[:-1], dtype=np.int64), params)
    fleet.workers[OLD].core.handle(Start(request, NEW, LegKind.DECODE), 0.0)
    fleet.run()
    last = [token for output in fleet.workers[OLD].outputs[3] for token in output.token_ids]
    assert tokens + last == RIGHT
    assert ending(fleet, OLD, 3).stats.cached_tokens == 12, "its first 15 tokens were computed here"
    assert_clean(fleet)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_moves", range(9))
def test_an_abort_at_any_moment_has_it_run_on_or_be_gone(
    fleet_class: type[Fleet], num_moves: int, overlap: bool
) -> None:
    """The new room is aborted: who asked for the move doesn't want it any more."""
    fleet = moving(fleet_class(Role.UNIFIED, Role.UNIFIED, overlap=overlap), 5)
    if num_moves > 2:
        start_at_new(fleet, held(fleet))
    for count in range(num_moves):
        fleet.deliver(1 + count % 2)
    for worker in fleet.workers.values():
        worker.core.handle(AbortRoom(NEW, "not wanted"), 0.0)
    fleet.run()
    if ending(fleet, OLD, NEW).failure is None:  # it had been acknowledged
        assert ending(fleet, OLD, OLD).failure.code is FailureCode.HANDED_BACK
    else:
        assert fleet.tokens(OLD) == RIGHT, "and the output is what it would have been"
    assert_clean(fleet)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_moves", range(9))
def test_its_client_leaves_at_any_moment(fleet_class: type[Fleet], num_moves: int, overlap: bool) -> None:
    fleet = moving(fleet_class(Role.UNIFIED, Role.UNIFIED, overlap=overlap), 5)
    if num_moves > 2:
        start_at_new(fleet, held(fleet))
    for count in range(num_moves):
        fleet.deliver(1 + count % 2)
    for room in (OLD, NEW):
        for worker in fleet.workers.values():
            worker.core.handle(AbortRoom(room, "not wanted"), 0.0)
    fleet.run()
    assert_clean(fleet)


def test_a_new_worker_that_refuses_leaves_the_request_where_it_is(fleet_class: type[Fleet]) -> None:
    fleet = moving(fleet_class(Role.UNIFIED, Role.PREFILL), 5)
    start_at_new(fleet, held(fleet))
    fleet.deliver(NEW)
    assert "no decode legs" in ending(fleet, NEW, NEW).failure.message
    fleet.workers[OLD].core.handle(AbortRoom(NEW, "refused there"), 0.0)
    fleet.run()
    assert fleet.tokens(OLD) == RIGHT
    assert_clean(fleet)


def test_without_pages_at_the_new_worker_it_stands_still_for_half_a_second(fleet_class: type[Fleet]) -> None:
    fleet = moving(fleet_class(Role.UNIFIED, Role.UNIFIED), 5)
    held(fleet)
    core = fleet.workers[OLD].core
    assert core.next_deadline_s() == 0.5
    core.expire(0.5)
    fleet.deliver(OLD)
    assert "granted no pages" in ending(fleet, OLD, NEW).failure.message
    fleet.run()
    assert fleet.tokens(OLD) == RIGHT
    assert_clean(fleet)


def test_a_lost_link_has_it_run_on(fleet_class: type[Fleet]) -> None:
    fleet = moving(fleet_class(Role.UNIFIED, Role.UNIFIED), 5)
    start_at_new(fleet, held(fleet))
    fleet.workers[OLD].core.handle(PeerDown(NEW, "cut"), 0.0)
    fleet.workers[NEW].core.handle(PeerDown(OLD, "cut"), 0.0)
    fleet.workers[NEW].core.handle(WriterGone(OLD), 0.0)
    fleet.run()
    assert ending(fleet, OLD, NEW).failure.code is FailureCode.PEER_LOST
    assert fleet.tokens(OLD) == RIGHT
    assert_clean(fleet)


def test_an_adapters_slot_goes_to_another_meanwhile_and_comes_back(fleet_class: type[Fleet]) -> None:
    turns = AdapterTurns(1)
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, turns=turns)
    core = fleet.workers[OLD].core
    for room, adapter in ((OLD, 7), (OTHER, 8)):
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        request = new_request(
            room, np.array(PROMPT, dtype=np.int64), params, extra_key=bytes([adapter]), adapter=adapter
        )
        core.handle(Start(request, 0, LegKind.LOCAL), 0.0)
    while len(fleet.tokens(OLD)) < 5:
        fleet.advance(OLD)
    assert fleet.tokens(OTHER) == [], "there is one slot, which the other adapter has"
    core.handle(Move(NEW, OLD, NEW), 0.0)
    held(fleet)
    for _ in range(3):
        fleet.advance(OLD)
    assert 0 < len(fleet.tokens(OTHER)) < MAX_TOKENS
    core.handle(PeerDown(NEW, "cut"), 0.0)
    fleet.run()
    assert (len(fleet.tokens(OLD)), fleet.tokens(OTHER)) == (5, RIGHT), "it has its pages back, and waits for its slot"
    turns.end(OTHER)  # as the scheduler does for a room that has ended
    fleet.run()
    assert fleet.tokens(OLD) == RIGHT
    assert turns.num_placed == 3
    turns.check()
    assert_clean(fleet)


def test_a_worker_that_leaves_completes_what_the_new_one_has_granted_pages_for(fleet_class: type[Fleet]) -> None:
    fleet = moving(fleet_class(Role.UNIFIED, Role.UNIFIED), 5)
    tokens = held(fleet)
    start_at_new(fleet, tokens)
    fleet.deliver(NEW)  # the grant, which is answered with all pages
    for room in (OLD, NEW):
        fleet.workers[OLD].core.handle(HandBack(room), 0.0)
    fleet.run()
    assert ending(fleet, OLD, OLD).failure.code is FailureCode.HANDED_BACK
    assert tokens + [token for _, token in sorted(new_tokens(fleet).items())] == RIGHT
    assert_clean(fleet)


def test_a_recurrent_state_stays_where_it_is(fleet_class: type[Fleet]) -> None:
    def model(num_pages: int) -> tuple[Any, RecurrentRunner]:
        kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
        return kv, RecurrentRunner(NullRunner(kv, VOCAB), kv, new_states(8, PAGE), VOCAB)

    fleet = moving(fleet_class(Role.UNIFIED, Role.UNIFIED, model=model, pages_per_state=1), 5)
    fleet.run()
    assert "recurrent state" in ending(fleet, OLD, NEW).failure.message
    assert len(fleet.tokens(OLD)) == MAX_TOKENS
    assert_clean(fleet)


def test_a_request_ends_in_the_step_that_it_was_to_be_held_behind(fleet_class: type[Fleet]) -> None:
    fleet = moving(fleet_class(Role.UNIFIED, Role.UNIFIED, overlap=True), MAX_TOKENS - 1)
    fleet.run()
    assert fleet.tokens(OLD) == RIGHT
    assert "ended meanwhile" in ending(fleet, OLD, NEW).failure.message
    assert_clean(fleet)


def test_what_can_not_move_is_refused_by_name(fleet_class: type[Fleet]) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    core = fleet.workers[OLD].core

    def why(moved: int, peer: int) -> str:
        core.handle(Move(NEW, moved, peer), 0.0)
        fleet.deliver(OLD)
        words: str = ending(fleet, OLD, NEW).failure.message
        return words

    assert "is not open here" in why(OLD, NEW)
    fleet.start(OLD, PROMPT, OLD, OLD, MAX_TOKENS)
    assert "does not make output now" in why(OLD, NEW), "its prompt is being computed"
    while len(fleet.tokens(OLD)) < 3:
        fleet.advance(OLD)
    assert "no link to worker" in why(OLD, 7)
    core.handle(Move(OLD, OLD, NEW), 0.0)
    fleet.deliver(OLD)
    assert "already in use" in fleet.workers[OLD].outputs[OLD][-1].failure.message
    fleet.workers[OLD].outputs[OLD].pop()
    fleet.run()
    assert fleet.tokens(OLD) == RIGHT
    assert_clean(fleet)


def assert_clean(fleet: Fleet) -> None:
    for worker in fleet.workers.values():
        counts = worker.cache.pool.counts()
        held = [count for state, count in counts.items() if state not in ("free", "cached")]
        assert (worker.core.report().num_open_rooms, any(held)) == (0, False)
        worker.stepping.close()
