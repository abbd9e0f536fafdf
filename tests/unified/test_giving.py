"""What a worker that leaves has cached is at its peers afterwards: the best first, where there is room, within time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from null_runner import NullRunner, expected_output
from slow_tier import SlowTier
from windowed_runner import WindowedRunner
from windowed_runner import expected_output as expected_with_windows

from diptych.common.members.roles import LegKind, Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.peer_pages import PeerPages
from diptych.engine.values.core_report import CoreCounts
from diptych.engine.values.events import Event, GiveCache, NoteArrived, PeerDown, SendNote, WriterGone
from diptych.engine.values.window_pages import WindowPages
from diptych.kvtransfer.notes import OfferEnded, Pull, StopPull
from diptych.unified import giving, pulling
from diptych.unified.giving import MAX_OFFERED, MAX_TRIES
from diptych.unified.giving_order import HALF_LIFE_S, Run, giving_order, takers
from diptych.unified.pull_prices import MISSED_S

VOCAB, PAGE = 1000, 4
TEXT = list(range(100, 140))
LEAVER, TAKER, OTHER = 1, 2, 3
FleetClass = Any  # the fixture's class: test helpers can't be imported


@pytest.fixture
def fleet(fleet_class: FleetClass) -> Any:
    """Two workers, of which one has computed TEXT, ten pages, and made some output."""
    return with_text(fleet_class(Role.UNIFIED, Role.UNIFIED))


def with_text(fleet: Any) -> Any:
    fleet.start(90, TEXT, LEAVER, LEAVER)
    fleet.run()
    return fleet


def handle(fleet: Any, worker: int, event: Event, now_s: float = 0.0) -> None:
    fleet.workers[worker].core.handle(event, now_s)


def leave(fleet: Any, within_s: float = 3.0) -> None:
    handle(fleet, LEAVER, GiveCache(within_s))


def notes_of(fleet: Any, worker: int) -> list[Any]:
    return [each.note for each in fleet.workers[worker].core.pop_effects() if isinstance(each, SendNote)]


def counts(fleet: Any, worker: int) -> CoreCounts:
    report: CoreCounts = fleet.workers[worker].core.report().counts
    return report


def cached(fleet: Any, worker: int, tokens: Sequence[int] = TEXT, extra_key: bytes = b"") -> int:
    """Return how many of the tokens a worker has cached."""
    found: int = fleet.workers[worker].cache.tree.peek(np.array(tokens), extra_key)
    return found


def compute(fleet: Any, worker: int, room: int, prompt: Sequence[int], times: int = 1) -> None:
    for time in range(times):
        fleet.start(room + time, prompt, worker, worker, max_tokens=1)
        fleet.run()


def is_open(fleet: Any, worker: int = LEAVER) -> bool:
    return bool(fleet.workers[worker].core.report().num_open_rooms)


# what comes of it


def test_what_one_had_that_leaves_is_found_at_its_peer(fleet: Any) -> None:
    leave(fleet)
    assert is_open(fleet), "the drain waits"
    fleet.run()
    assert not is_open(fleet)
    assert (counts(fleet, LEAVER).pages_given, counts(fleet, TAKER).pages_taken) == (11, 11), "with a page of output"
    fleet.start(1, [*TEXT, 7, 8], TAKER, TAKER)
    fleet.run()
    assert fleet.workers[TAKER].outputs[1][0].stats.cached_tokens == len(TEXT)
    assert fleet.tokens(1) == expected_output([*TEXT, 7, 8], 5, VOCAB)
    assert counts(fleet, TAKER).pages_pulled == 11, "nothing came for the request"
    for worker in fleet.workers.values():
        assert worker.cache.audit(worker.core.report().holders) == []


def test_only_what_a_peer_lacks_goes_to_it(fleet: Any) -> None:
    compute(fleet, TAKER, 1, TEXT[:24])
    leave(fleet)
    fleet.run()
    assert counts(fleet, TAKER).pages_taken == 11 - 6
    leave(fleet)
    fleet.run()
    assert counts(fleet, TAKER).pages_taken == 11 - 6, "what is known is not sent again"
    assert not is_open(fleet)


def test_texts_keep_their_namespaces(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    fleet.start_leg(LEAVER, 1, TEXT, LegKind.LOCAL, 0, extra_key=b"one tenant")
    fleet.run()
    leave(fleet)
    fleet.run()
    assert cached(fleet, TAKER, extra_key=b"one tenant") == len(TEXT)
    assert cached(fleet, TAKER) == cached(fleet, TAKER, extra_key=b"another") == 0


def test_windows_come_with_the_text(fleet_class: FleetClass) -> None:
    windows = WindowPages(2, 10)

    def model(num_pages: int) -> tuple[Any, WindowedRunner]:
        kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
        return kv, WindowedRunner(NullRunner(kv, VOCAB), kv, windows, VOCAB)

    fleet = with_text(fleet_class(Role.UNIFIED, Role.UNIFIED, num_pages=256, model=model, windows=windows))
    answer = fleet.tokens(90)
    leave(fleet)
    fleet.run()
    turn = [*TEXT, *answer, 7, 8]
    fleet.start(1, turn, TAKER, TAKER)
    fleet.run()
    assert fleet.workers[TAKER].outputs[1][0].stats.cached_tokens == 44
    assert fleet.tokens(1) == expected_with_windows(turn, 5, VOCAB, windows)


def test_many_texts_go_evenly_to_all_peers(fleet_class: FleetClass) -> None:
    fleet = fleet_class(*[Role.UNIFIED] * 3, num_pages=400)
    texts = [[500 + number, *range(number, number + 15)] for number in range(40)]
    for room, text in enumerate(texts, 100):
        compute(fleet, LEAVER, room, text)
    leave(fleet)
    fleet.run()
    held = [[cached(fleet, worker, text) for text in texts] for worker in (TAKER, OTHER)]
    assert [max(pair) for pair in zip(*held, strict=True)] == [16] * 40
    assert [min(pair) for pair in zip(*held, strict=True)] == [0] * 40
    assert 10 <= sum(map(bool, held[0])) <= 30


# what is not taken


@pytest.mark.parametrize("why", ["no time", "no pulls here", "no pulls there", "another making", "no peers"])
def test_nothing_is_given_where_it_can_not_be(fleet: Any, why: str) -> None:
    match why:
        case "no pulls here":
            fleet.workers[LEAVER].core._giving._is_on = False
        case "no pulls there":
            taking = fleet.workers[TAKER].core._pulling
            taking._means = replace(taking._means, takes=lambda: False)
        case "another making":
            fleet.workers[TAKER].cache.made_by = "other weights"
        case "no peers":
            handle(fleet, LEAVER, PeerDown(TAKER, "cut"))
    leave(fleet, 0.0 if why == "no time" else 3.0)
    assert is_open(fleet) == (why in ("no pulls there", "another making"))
    fleet.run()
    assert not is_open(fleet)
    assert cached(fleet, TAKER) == 0
    assert counts(fleet, LEAVER).pages_given == 0


def test_who_leaves_takes_nothing(fleet: Any) -> None:
    handle(fleet, TAKER, GiveCache(0.0))
    leave(fleet)
    fleet.run()
    assert cached(fleet, TAKER) == 0
    assert counts(fleet, LEAVER).offers_declined == 1


def test_a_full_peer_gives_up_nothing_that_is_wanted_more() -> None:
    """Its pages are evicted from the oldest one on, as far as that is older than what is offered."""
    cache = KvCache(num_pages=21, page_size=PAGE, max_requests=2, max_tokens_per_request=80)
    pages = PeerPages(cache)
    for first, now_s in ((900, 10.0), (901, 30.0)):  # two texts of eight pages; four pages are left
        cache.tree.at(now_s)
        arriving = pages.expect(np.array([first, *range(31)]), b"", 0)
        assert arriving is not None
        pages.accept(arriving, 8)
    cache.tree.at(40.0)
    free = cache.pool.num_free
    for idle_s, num_pages in ((35.0, free), (25.0, free + 8), (10.5, free + 8), (5.0, free + 16)):
        assert pages.has_room_below(num_pages, 1, idle_s)
        assert not pages.has_room_below(num_pages + 1, 1, idle_s)
    cache.tree.lock(cache.tree.end_of(np.array([900, *range(31)])))
    assert not pages.has_room_below(free + 1, 1, 25.0), "what is in use does not go"


def test_of_texts_that_were_used_more_often_more_goes_where_that_is_the_order() -> None:
    cache = KvCache(num_pages=20, page_size=PAGE, max_requests=2, max_tokens_per_request=80, eviction_policy="lfu")
    pages = PeerPages(cache)
    arriving = pages.expect(np.arange(32), b"", 0, num_uses=5)
    assert arriving is not None
    pages.accept(arriving, 8)
    cache.tree.at(10.0)
    free = cache.pool.num_free
    assert [pages.has_room_below(free + 1, num_uses, 0.0) for num_uses in (4, 6)] == [False, True]


def test_an_offer_that_finds_no_room_is_made_to_the_next_peer_and_who_is_full_hears_of_no_other(
    fleet_class: FleetClass,
) -> None:
    fleet = fleet_class(*[Role.UNIFIED] * 3, num_pages=200)
    for room in range(100, 110):
        compute(fleet, LEAVER, room, [room, *range(31)])
    leave(fleet)
    offers = [each for each in fleet.workers[LEAVER].core.pop_effects() if isinstance(each, SendNote)]
    first = next(each for each in offers if each.peer == TAKER)
    for each in offers:
        handle(fleet, LEAVER, NoteArrived(each.peer, OfferEnded(each.note.room, "full" if each is first else "known")))
    again = [each for each in fleet.workers[LEAVER].core.pop_effects() if isinstance(each, SendNote)]
    assert {each.peer for each in again} == {OTHER}
    assert first.note.room in {each.note.room for each in again}


# what goes wrong


def test_a_peer_that_dies_in_the_midst_costs_nothing_and_others_get_its_texts(fleet_class: FleetClass) -> None:
    fleet = with_text(fleet_class(*[Role.UNIFIED] * 3))
    leave(fleet)
    (sent,) = [each for each in fleet.workers[LEAVER].core.pop_effects() if isinstance(each, SendNote)]
    handle(fleet, LEAVER, PeerDown(sent.peer, "it died"))
    fleet.run()
    assert cached(fleet, TAKER + OTHER - sent.peer) == len(TEXT)
    assert cached(fleet, sent.peer) == 0


def test_who_leaves_may_die_while_it_is_pulled_from(fleet: Any) -> None:
    leave(fleet)
    (offer,) = notes_of(fleet, LEAVER)
    handle(fleet, TAKER, NoteArrived(LEAVER, offer))
    (pull,) = notes_of(fleet, TAKER)
    assert isinstance(pull, Pull)
    handle(fleet, TAKER, PeerDown(LEAVER, "it died"))
    assert fleet.workers[TAKER].cache.pool.counts()["quarantined"] == len(pull.pages)
    assert notes_of(fleet, TAKER) == [], "there is nobody to be told"
    handle(fleet, TAKER, WriterGone(LEAVER))
    assert fleet.workers[TAKER].cache.pool.counts()["quarantined"] == 0
    assert cached(fleet, TAKER) == 0


def test_bytes_that_are_not_those_that_were_sent_are_not_taken(fleet: Any) -> None:
    leave(fleet)
    (offer,) = notes_of(fleet, LEAVER)
    handle(fleet, TAKER, NoteArrived(LEAVER, offer))
    (pull,) = notes_of(fleet, TAKER)
    handle(fleet, LEAVER, NoteArrived(TAKER, pull))
    fleet.deliver(LEAVER)
    fleet.workers[TAKER].kv[pull.pages[3]] ^= np.uint64(1)
    fleet.run()
    assert (cached(fleet, TAKER), counts(fleet, TAKER).pulls_wrong, counts(fleet, TAKER).pages_taken) == (0, 1, 0)
    assert (counts(fleet, LEAVER).pages_given, counts(fleet, LEAVER).offers_declined) == (0, 1)
    assert not is_open(fleet)


def test_the_drain_waits_no_longer_than_it_may(fleet: Any) -> None:
    leaver = fleet.workers[LEAVER].core
    leave(fleet, 2.0)
    assert leaver.next_deadline_s() == 2.0
    leaver.expire(1.9)
    assert is_open(fleet)
    leaver.expire(2.0)
    assert not is_open(fleet)


def test_what_is_asked_for_is_written_no_longer_than_the_drain_waits(fleet: Any) -> None:
    leave(fleet, 0.2)
    (offer,) = notes_of(fleet, LEAVER)
    handle(fleet, TAKER, NoteArrived(LEAVER, offer), 5.0)
    (pull,) = notes_of(fleet, TAKER)
    assert pull.timeout_s == pytest.approx(0.2)
    fleet.workers[TAKER].core.expire(5.2)
    assert [type(note) for note in notes_of(fleet, TAKER)] == [OfferEnded, StopPull]


def test_time_that_is_up_early_ends_it(fleet: Any) -> None:
    leave(fleet, 2.0)
    leave(fleet, 0.0)
    assert not is_open(fleet)
    fleet.run()
    assert cached(fleet, TAKER) == len(TEXT), "what was offered before is taken"


def test_answers_that_come_twice_or_from_others_count_once(fleet: Any) -> None:
    leave(fleet)
    (offer,) = notes_of(fleet, LEAVER)
    ended = OfferEnded(offer.room, "taken", 11)
    for peer in (OTHER, TAKER, TAKER):
        handle(fleet, LEAVER, NoteArrived(peer, ended))
    assert counts(fleet, LEAVER).pages_given == 11


def test_an_offer_that_comes_twice_is_pulled_once(fleet: Any) -> None:
    leave(fleet)
    (offer,) = notes_of(fleet, LEAVER)
    for _ in range(2):
        handle(fleet, TAKER, NoteArrived(LEAVER, offer))
    assert len(notes_of(fleet, TAKER)) == 1


def test_two_that_leave_at_once_with_the_same_text_are_both_done(fleet_class: FleetClass) -> None:
    fleet = with_text(fleet_class(*[Role.UNIFIED] * 3))
    fleet.start(91, TEXT, OTHER, OTHER)
    fleet.run()
    for one, another in ((LEAVER, OTHER), (OTHER, LEAVER)):
        handle(fleet, one, PeerDown(another, "it leaves"))
        handle(fleet, one, GiveCache(3.0))
    fleet.run()
    assert cached(fleet, TAKER) == len(TEXT)
    assert (is_open(fleet, LEAVER), is_open(fleet, OTHER)) == (False, False)
    assert {counts(fleet, leaver).pages_given for leaver in (LEAVER, OTHER)} == {0, 11}


def test_an_offer_of_what_is_in_quarantine_is_answered(fleet: Any) -> None:
    leave(fleet)
    (offer,) = notes_of(fleet, LEAVER)
    handle(fleet, TAKER, NoteArrived(LEAVER, offer))
    fleet.workers[TAKER].core.expire(100.0)
    assert [type(note) for note in notes_of(fleet, TAKER)] == [Pull, OfferEnded, StopPull]
    handle(fleet, TAKER, NoteArrived(LEAVER, offer), 100.0 + MISSED_S)
    assert notes_of(fleet, TAKER) == [OfferEnded(offer.room, "failed")]


@pytest.fixture
def tiered(fleet_class: FleetClass) -> Any:
    """The taker has the beginning of TEXT, in a tier."""
    fleet = with_text(fleet_class(Role.UNIFIED, Role.UNIFIED, tiers=lambda kv: [SlowTier(16, kv)]))
    compute(fleet, TAKER, 1, TEXT[:24])
    fleet.workers[TAKER].cache._evict(7)
    return fleet


def test_a_text_that_can_not_be_taken_keeps_no_other_from_being_taken(
    tiered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving, "MAX_OFFERED", 1)
    other = list(range(500, 516))
    compute(tiered, LEAVER, 100, TEXT, times=3)
    compute(tiered, LEAVER, 110, other)
    leave(tiered)
    tiered.run()
    assert (cached(tiered, TAKER), cached(tiered, TAKER, other)) == (24, len(other))
    assert counts(tiered, LEAVER).offers_declined >= 1


def test_who_has_too_many_pulls_at_the_moment_is_not_full(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "MAX_PULLS", 0)
    leave(fleet)
    (offer,) = notes_of(fleet, LEAVER)
    handle(fleet, TAKER, NoteArrived(LEAVER, offer))
    assert notes_of(fleet, TAKER) == [OfferEnded(offer.room, "failed")]


def test_no_text_is_offered_for_ever(fleet_class: FleetClass) -> None:
    fleet = with_text(fleet_class(*[Role.UNIFIED] * (MAX_TRIES + 2)))
    leave(fleet)
    for number in range(MAX_TRIES):
        (sent,) = [each for each in fleet.workers[LEAVER].core.pop_effects() if isinstance(each, SendNote)]
        assert is_open(fleet), number
        handle(fleet, LEAVER, NoteArrived(sent.peer, OfferEnded(sent.note.room, "failed")))
    assert not is_open(fleet)
    assert notes_of(fleet, LEAVER) == []
    assert counts(fleet, LEAVER).offers_declined == 1


# which, in what order, to whom


def test_the_hottest_are_offered_first_so_many_at_a_time(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, num_pages=400)
    for number in range(8):
        compute(fleet, LEAVER, 100 + 10 * number, [number, *range(15)], times=1 + number)
    leave(fleet)
    offered = [(note.num_uses, note.tokens[0]) for note in notes_of(fleet, LEAVER)]
    assert offered == [(8, 7), (7, 6), (6, 5), (5, 4)]
    assert len(offered) == MAX_OFFERED


def test_a_page_is_worth_what_it_is_likely_to_save() -> None:
    runs = [
        Run(-1, 0, 10, num_uses=2, idle_s=0.0),
        Run(-1, 0, 10, num_uses=8, idle_s=HALF_LIFE_S),
        Run(-1, 0, 10, num_uses=8, idle_s=4 * HALF_LIFE_S),
        Run(-1, 90, 10, num_uses=2, idle_s=0.0),
    ]
    assert giving_order(runs, lambda first, count: math.inf) == [1, 0, 3, 2]
    assert giving_order(runs, lambda first, count: (first + count / 2) * count) == [3, 1, 0, 2], "late pages cost more"


def test_what_comes_with_another_text_is_not_offered_by_itself() -> None:
    """A beginning that all have goes first, by itself; one that has one end goes with that."""
    shared = Run(-1, 0, 10, num_uses=9, idle_s=0.0)
    ends = [Run(0, 10, 5, num_uses=uses, idle_s=0.0) for uses in (1, 2, 3)]
    assert giving_order([shared, *ends], lambda first, count: count) == [0, 3, 2, 1]
    assert giving_order([shared, Run(0, 10, 5, 5, 0.0)], lambda first, count: count) == [1]


def test_texts_are_spread_over_peers_and_stay_where_they_were_when_one_leaves() -> None:
    firsts = {name: takers(name, range(5))[0] for name in range(1000)}
    shares = [list(firsts.values()).count(peer) for peer in range(5)]
    assert min(shares) > 150
    fewer = {name: takers(name, range(4))[0] for name in range(1000)}
    assert all(fewer[name] == peer for name, peer in firsts.items() if peer != 4)
    assert takers(7, range(5), tried={firsts[7]}) == takers(7, range(5))[1:]


def test_texts_that_wait_for_a_busy_peer_let_others_pass(
    fleet_class: FleetClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving, "takers", lambda name, peers, tried: [TAKER + name % 2])
    fleet = fleet_class(*[Role.UNIFIED] * 3, num_pages=400)
    for room in range(100, 130):
        compute(fleet, LEAVER, room, [room, *range(15)])
    leave(fleet)
    sent = [each.peer for each in fleet.workers[LEAVER].core.pop_effects() if isinstance(each, SendNote)]
    assert (sent.count(TAKER), sent.count(OTHER)) == (MAX_OFFERED, MAX_OFFERED)
