"""While a session waits for a tool, what its text has grown by comes to who computes its next turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from null_runner import expected_output

from diptych.common.members.roles import LegKind, Role
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.values.events import Move, NoteArrived, PeerDown, PeerUp, SendNote, Start, ToolCalled
from diptych.engine.values.request import new_request
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer.notes import Offer, OfferEnded, Pull
from diptych.unified import ahead
from diptych.unified.ahead import LEAST_S, MAX_OFFERED, MAX_WAITING, REFUSED_S, ahead_id, caller
from diptych.unified.pull import pull_id

VOCAB = 1000
TEXT = list(range(100, 128))  # seven pages
PREFILL, DECODE = 1, 2
NUM_OUTPUT = 9  # of which the last is in no cache
FleetClass = Any  # the fixture's class: test helpers can't be imported


@pytest.fixture
def fleet(fleet_class: FleetClass) -> Any:
    return fleet_class(Role.PREFILL, Role.DECODE)


def serve(fleet: Any, room: int, text: list[int]) -> list[int]:
    """Return what the text has become."""
    fleet.start(room, text, PREFILL, DECODE, NUM_OUTPUT)
    fleet.run()
    return [*text, *fleet.tokens(room)]


def call(fleet: Any, room: int, now_s: float = 0.0) -> None:
    """Tell both workers of a tool, as a router does."""
    for worker in (PREFILL, DECODE):
        fleet.workers[worker].core.handle(ToolCalled(room, "shell"), now_s)


def cached(fleet: Any, text: list[int]) -> int:
    found: int = fleet.workers[PREFILL].cache.tree.peek(np.array(text))
    return found


def notes_of(fleet: Any, now_s: float = 0.0) -> list[Any]:
    """Return what the worker with the outputs says next."""
    fleet.workers[DECODE].core.expire(now_s)
    return said(fleet, DECODE)


def said(fleet: Any, worker: int) -> list[Any]:
    return [each.note for each in fleet.workers[worker].core.pop_effects() if isinstance(each, SendNote)]


def test_an_output_is_where_its_session_goes_on_before_it_returns(fleet: Any) -> None:
    history = serve(fleet, 9, TEXT)
    assert cached(fleet, history) == len(TEXT)
    call(fleet, 9)
    fleet.run()
    assert cached(fleet, history) == 36, "all whole pages of the history"
    taken, given = (fleet.workers[worker].core.report().counts for worker in (PREFILL, DECODE))
    assert (taken.pages_taken, given.pages_given) == (2, 2), "and nothing else came"
    turn = [*history, 7, 8]
    fleet.start(10, turn, PREFILL, DECODE)
    fleet.run()
    assert fleet.workers[PREFILL].core.report().counts.pages_pulled == 2, "nothing had to come for the turn"
    assert fleet.workers[PREFILL].outputs[10][-1].stats.cached_tokens == 36
    assert fleet.tokens(10) == expected_output(turn, 5, VOCAB)


def test_what_came_is_kept_for_the_session_as_the_rest_of_its_text(fleet: Any) -> None:
    history = serve(fleet, 9, TEXT)
    call(fleet, 9)
    tree = fleet.workers[PREFILL].cache.tree
    assert tree.pins.num_pages == 7
    fleet.run()
    assert (len(tree.pins), tree.pins.num_pages) == (1, 9)
    fleet.start_leg(PREFILL, 10, [*history, 7, 8], LegKind.PREFILL, DECODE)
    assert fleet.workers[PREFILL].cache.sessions.counts.kept_returns == 1


def test_all_that_was_lost_of_a_text_comes_back(fleet: Any) -> None:
    history = serve(fleet, 9, TEXT)
    cache = fleet.workers[PREFILL].cache
    cache.clear()
    call(fleet, 9)
    fleet.run()
    assert cached(fleet, history) == 36


def test_the_word_may_come_before_the_output_has_ended(fleet: Any) -> None:
    fleet.start(9, TEXT, PREFILL, DECODE, NUM_OUTPUT)
    call(fleet, 9)
    fleet.run()
    assert cached(fleet, [*TEXT, *fleet.tokens(9)]) == 36


def test_nothing_is_offered_for_a_session_that_is_not_worth_waiting_for(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RadixTree, "price", lambda self: 1e6)  # of memory
    history = serve(fleet, 9, TEXT)
    call(fleet, 9)
    assert notes_of(fleet) == []
    fleet.run()
    assert cached(fleet, history) == len(TEXT)


def test_nothing_goes_for_it_that_was_wanted_since(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.PREFILL, Role.DECODE)
    history = serve(fleet, 9, TEXT)
    other = [500, *range(39)]
    fleet.start(20, other, PREFILL, DECODE, 1)
    fleet.run()
    cache = fleet.workers[PREFILL].cache
    cache.take_for_peer(cache.pool.num_free)  # nothing is free
    call(fleet, 9)
    (offer,) = notes_of(fleet)
    assert isinstance(offer, Offer)
    assert offer.idle_s > 0, "as if it had not been wanted for so long"
    fleet.workers[PREFILL].core.handle(NoteArrived(DECODE, offer), 0.0)
    assert said(fleet, PREFILL) == [OfferEnded(ahead_id(9), "full")]
    assert cached(fleet, other) == 40
    assert cached(fleet, history) == len(TEXT)


def test_so_many_are_offered_at_a_time_and_the_others_when_these_have_ended(
    fleet_class: FleetClass,
) -> None:
    fleet = fleet_class(Role.PREFILL, Role.DECODE, num_pages=400)
    rooms = range(9, 9 + MAX_OFFERED + 2)
    histories = [serve(fleet, room, [room, *TEXT]) for room in rooms]
    for room in rooms:
        call(fleet, room)
    core = fleet.workers[DECODE].core
    core.expire(0.0)
    first = [each for each in core.pop_effects() if isinstance(each, SendNote)]
    assert [each.note.room for each in first] == [ahead_id(room) for room in rooms[:MAX_OFFERED]]
    for each in first:
        fleet.workers[PREFILL].core.handle(NoteArrived(DECODE, each.note), 0.0)
    fleet.run()
    assert [cached(fleet, history) for history in histories] == [36] * len(rooms)


def test_a_text_whose_return_is_not_waited_for_any_more_is_forgotten(fleet: Any) -> None:
    serve(fleet, 9, TEXT)
    call(fleet, 9)
    (left,) = fleet.workers[DECODE].cache.sessions.left
    assert notes_of(fleet, left.until_s) == []
    assert not fleet.workers[DECODE].cache.sessions.left


def test_what_has_hardly_any_time_left_is_not_offered(fleet: Any) -> None:
    serve(fleet, 9, TEXT)
    call(fleet, 9)
    (left,) = fleet.workers[DECODE].cache.sessions.left
    assert notes_of(fleet, left.until_s - 0.9 * LEAST_S) == []


@pytest.mark.parametrize(("within_s", "kind"), [(0.02, Pull), (60.0, OfferEnded)])
def test_who_has_no_time_for_an_offer_does_not_take_its_peer_to_be_slow(
    fleet: Any, within_s: float, kind: type
) -> None:
    for room in (9, 10):
        serve(fleet, room, [room, *TEXT])
    call(fleet, 9)
    call(fleet, 10)
    first, second = notes_of(fleet)
    taker = fleet.workers[PREFILL].core
    taker.handle(NoteArrived(DECODE, replace(first, within_s=within_s)), 0.0)
    (pull,) = said(fleet, PREFILL)
    assert (pull.room, pull.timeout_s <= within_s) == (first.room, True)
    taker.expire(pull.timeout_s)
    assert taker.report().counts.pulls_missed == 1
    taker.pop_effects()
    taker.handle(NoteArrived(DECODE, second), pull.timeout_s)
    (answer,) = said(fleet, PREFILL)
    assert (type(answer), answer.room) == (kind, second.room)


def test_a_peer_that_takes_none_gets_no_more_for_a_while(fleet: Any) -> None:
    """All tokens of a text are in an offer."""
    giver, taker = (fleet.workers[worker] for worker in (DECODE, PREFILL))
    taker.cache.made_by = "other weights"
    rooms = range(9, 13)
    for room in rooms:
        serve(fleet, room, [room, *TEXT])
    for room, now_s, num_offers in zip(rooms, (0.0, 1.0, REFUSED_S, REFUSED_S + 1), (1, 0, 1, 1), strict=True):
        call(fleet, room, now_s)
        offers = notes_of(fleet, now_s)
        assert len(offers) == num_offers
        for offer in offers:
            taker.core.handle(NoteArrived(DECODE, offer), now_s)
            (answer,) = said(fleet, PREFILL)
            assert answer == OfferEnded(offer.room, "refused")
            giver.core.handle(NoteArrived(PREFILL, answer), now_s)
        if now_s == REFUSED_S:
            giver.core.handle(PeerUp(PREFILL), now_s)


def test_a_request_that_has_moved_is_offered_to_who_computed_its_prompt(fleet_class: FleetClass) -> None:
    fleet, moved, new = fleet_class(Role.PREFILL, Role.DECODE, Role.DECODE), 77, 3
    fleet.start(9, TEXT, PREFILL, DECODE, 40)
    while len(fleet.tokens(9)) < 6:
        for worker in fleet.workers:
            fleet.advance(worker)
    fleet.workers[DECODE].core.handle(Move(moved, 9, new), 0.0)
    while not fleet.workers[DECODE].outputs[moved]:
        fleet.advance(DECODE)
    known = fleet.tokens(9)[:-1]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    request = new_request(moved, np.array([*TEXT, *known]), params, num_prior_output_tokens=len(known))
    start = Start(request, DECODE, LegKind.DECODE, computed_by=PREFILL)
    fleet.workers[new].core.handle(start, 0.0)
    fleet.run()
    for worker in (DECODE, new):
        fleet.workers[worker].core.handle(ToolCalled(moved, "shell"), 0.0)
        fleet.workers[worker].core.expire(0.0)
    offered = [
        (worker, each.peer, each.note.room)
        for worker in (DECODE, new)
        for each in fleet.workers[worker].core.pop_effects()
        if isinstance(each, SendNote)
    ]
    assert offered == [(new, PREFILL, ahead_id(moved))]


def test_offers_to_a_peer_that_is_lost_are_forgotten(fleet: Any) -> None:
    serve(fleet, 9, TEXT)
    call(fleet, 9)
    core = fleet.workers[DECODE].core
    (offer,) = notes_of(fleet)
    core.handle(PeerDown(PREFILL, "cut"), 0.0)
    assert not core._ahead.has(offer.room)
    assert core.report().num_open_rooms == 0, "and no drain waits for them"


def test_an_offer_is_answered_once_and_by_who_got_it(fleet: Any) -> None:
    serve(fleet, 9, TEXT)
    call(fleet, 9)
    core = fleet.workers[DECODE].core
    (offer,) = notes_of(fleet)
    core.handle(NoteArrived(99, OfferEnded(offer.room, "taken", 5)), 0.0)
    core.handle(NoteArrived(PREFILL, OfferEnded(offer.room, "taken", 2)), 0.0)
    core.handle(NoteArrived(PREFILL, OfferEnded(offer.room, "taken", 2)), 0.0)
    assert core.report().counts.pages_given == 2


def test_words_without_end_take_bounded_memory(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MAX_OFFERED", 0)
    serve(fleet, 9, TEXT)
    call(fleet, 9)
    core = fleet.workers[DECODE].core
    sessions = fleet.workers[DECODE].cache.sessions
    (left,) = sessions.left
    for _ in range(3):
        sessions.left.extend([left] * 1000)
        core.expire(0.0)
    assert len(core._ahead._waiting) == MAX_WAITING
    assert not sessions.left


def test_its_number_is_no_other_of_its_room() -> None:
    rooms = [1, 2**64 - 1, 0x3C7A_1E55_D20B_9648]
    assert all(ahead_id(room) not in (0, room, pull_id(room)) for room in rooms)
    assert [caller(ahead_id(room)) for room in rooms[:2]] == rooms[:2]


def test_what_is_pulled_is_asked_for_under_the_number_of_the_offer(fleet: Any) -> None:
    serve(fleet, 9, TEXT)
    call(fleet, 9)
    (offer,) = notes_of(fleet)
    fleet.workers[PREFILL].core.handle(NoteArrived(DECODE, offer), 0.0)
    (pull,) = said(fleet, PREFILL)
    assert isinstance(pull, Pull)
    assert (pull.room, pull.first_token) == (offer.room, len(TEXT))
