"""Prefixes are pulled from who has them: what is computed then, who waits, and what happens when it goes wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from null_runner import NullRunner, expected_output
from windowed_runner import WindowedRunner
from windowed_runner import expected_output as expected_with_windows

from diptych.common.members.roles import LegKind, Role
from diptych.engine.values.core_report import CoreCounts
from diptych.engine.values.events import (
    AbortRoom,
    Event,
    NoteArrived,
    PagesDigested,
    PeerDown,
    PeerUp,
    PrefixHolder,
    SendNote,
    WriteDone,
    WritePages,
    WriterGone,
)
from diptych.engine.values.window_pages import WindowPages
from diptych.kvtransfer.notes import Pull, Pulled, StopPull
from diptych.unified import lending
from diptych.unified.lending import KEEP_S, MAX_LENT
from diptych.unified.pull import TRANSITIONS, Phase, Signal, pull_id
from diptych.unified.pull_prices import HALF_LIFE_S, MISSED_S, OUTLIER, PullPrices

VOCAB, PAGE = 1000, 4
HISTORY = list(range(100, 140))
PROMPT = [*HISTORY, 7, 8, 9]
ASKING, HOLDER = 1, 2
FleetClass = Any  # the fixture's class: test helpers can't be imported


@pytest.fixture
def fleet(fleet_class: FleetClass) -> Any:
    """Two workers, of which one has computed HISTORY, ten pages, and made some output."""
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    fleet.start(90, HISTORY, HOLDER, HOLDER)
    fleet.run()
    weigh(fleet, lambda start, count: math.inf)
    return fleet


def weigh(fleet: Any, compute_s: Callable[[int, int], float]) -> None:
    """Say what it takes to compute: the clock stands still."""
    pulling = fleet.workers[ASKING].core._pulling
    pulling._means = replace(pulling._means, compute_s=compute_s)


def counts(fleet: Any, worker: int = ASKING) -> CoreCounts:
    report: CoreCounts = fleet.workers[worker].core.report().counts
    return report


def start(fleet: Any, room: int, prompt: Sequence[int], num_tokens: int | None = None, **others: Any) -> None:
    """Have the one worker serve a prompt, of which the other is said to have so many tokens."""
    holder = PrefixHolder(HOLDER, len(prompt) if num_tokens is None else num_tokens)
    fleet.start_leg(ASKING, room, prompt, LegKind.LOCAL, 0, holder=holder, **others)


def effects_of(fleet: Any, worker: int) -> list[Any]:
    popped: list[Any] = fleet.workers[worker].core.pop_effects()
    return popped


def handle(fleet: Any, worker: int, event: Event, now_s: float = 0.0) -> None:
    fleet.workers[worker].core.handle(event, now_s)


def ask(fleet: Any, room: int = 1) -> Pull:
    """Begin a pull, and return its note, which nobody has heard."""
    start(fleet, room, PROMPT)
    (note,) = [each.note for each in effects_of(fleet, ASKING) if isinstance(each, SendNote)]
    assert isinstance(note, Pull)
    return note


def check_empty(fleet: Any) -> None:
    for worker in fleet.workers.values():
        assert worker.core.report().num_open_rooms == 0
        assert worker.cache.audit(worker.core.report().holders) == []
        worker.cache.clear()
        assert worker.cache.pool.num_free == worker.cache.pool.capacity


@pytest.mark.parametrize(("phase", "signal"), [(phase, signal) for phase in Phase for signal in Signal])
def test_the_table_lists_every_move(phase: Phase, signal: Signal) -> None:
    legal = {
        (Phase.ASKED, Signal.WRITTEN),
        (Phase.ASKED, Signal.GIVEN_UP),
        (Phase.ASKED, Signal.ENDED),
        (Phase.VERIFYING, Signal.ENDED),
        (Phase.CLOSING, Signal.ENDED),
    }
    assert ((phase, signal) in TRANSITIONS) == ((phase, signal) in legal)


# what is gained


def test_what_another_worker_has_is_not_computed_again(fleet: Any) -> None:
    start(fleet, 1, PROMPT)
    fleet.run()
    assert fleet.tokens(1) == expected_output(PROMPT, 5, VOCAB)
    assert fleet.workers[ASKING].outputs[1][0].stats.cached_tokens == len(HISTORY)
    assert (counts(fleet).pages_pulled, counts(fleet, HOLDER).pages_lent) == (10, 10)
    check_empty(fleet)


def test_a_prompt_that_is_computed_for_another_worker_begins_behind_what_that_one_has(fleet_class: FleetClass) -> None:
    """The second turn of a chat: the reply's KV is at decode, and nowhere else."""
    fleet = fleet_class(Role.PREFILL, Role.DECODE)
    weigh(fleet, lambda start, count: math.inf)
    fleet.start(1, HISTORY, ASKING, HOLDER, max_tokens=9)
    fleet.run()
    turn = [*HISTORY, *fleet.tokens(1), 7, 8, 9]
    fleet.start_leg(HOLDER, 2, turn, LegKind.DECODE, ASKING)
    holder = PrefixHolder(HOLDER, 48)
    fleet.start_leg(ASKING, 2, turn, LegKind.PREFILL, HOLDER, holder=holder)
    fleet.run()
    assert fleet.tokens(2) == expected_output(turn, 5, VOCAB)
    assert fleet.workers[ASKING].outputs[2][0].stats.cached_tokens == 48
    assert counts(fleet).pages_pulled == 2, "the first ten are here"
    check_empty(fleet)


def test_a_holder_that_has_less_than_was_thought_gives_what_it_has(fleet: Any) -> None:
    other = [*HISTORY[:18], *range(500, 530)]
    start(fleet, 1, other)
    fleet.run()
    assert fleet.tokens(1) == expected_output(other, 5, VOCAB)
    assert (counts(fleet).pages_pulled, counts(fleet).pulls_refused) == (4, 0)
    check_empty(fleet)


@pytest.mark.parametrize("what", ["another prompt", "another namespace", "KV of another making", "it lends nothing"])
def test_what_the_holder_has_not_or_may_not_give_is_computed(fleet: Any, what: str) -> None:
    prompt = list(range(300, 340)) if what == "another prompt" else PROMPT
    if what == "KV of another making":
        fleet.workers[HOLDER].cache.made_by = "other weights"
    if what == "it lends nothing":
        fleet.workers[HOLDER].core._lending._is_on = False
    start(fleet, 1, prompt, extra_key=b"another" if what == "another namespace" else b"")
    fleet.run()
    assert fleet.tokens(1) == expected_output(prompt, 5, VOCAB)
    assert (counts(fleet).pages_pulled, counts(fleet).pulls_refused) == (0, 1)
    check_empty(fleet)


def test_requests_with_one_prefix_wait_for_one_pull(fleet: Any) -> None:
    prompts = {room: [*HISTORY, room, room + 1] for room in range(1, 5)} | {5: HISTORY[:24]}
    for room, prompt in prompts.items():
        start(fleet, room, prompt)
    notes = [each.note for each in effects_of(fleet, ASKING) if isinstance(each, SendNote)]
    assert len(notes) == 1
    assert not fleet.workers[ASKING].stepping.advance(lambda: None), "they wait, and hold nothing but what is granted"
    assert fleet.workers[ASKING].cache.pool.counts()["owned"] == 0
    handle(fleet, HOLDER, NoteArrived(ASKING, notes[0]))
    fleet.run()
    assert {room: fleet.tokens(room) for room in prompts} == {
        room: expected_output(prompt, 5, VOCAB) for room, prompt in prompts.items()
    }
    assert counts(fleet).pages_pulled == 10
    check_empty(fleet)


def test_nothing_is_pulled_that_is_computed_sooner(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.workers[ASKING].core._pulling._prices, "load_s", lambda peer, num_bytes, now_s: 2.0)
    for compute_s, num_pulled in ((1.0, 0), (3.0, 10)):
        weigh(fleet, partial(_taking, compute_s))
        start(fleet, int(compute_s), PROMPT)
        fleet.run()
        assert counts(fleet).pages_pulled == num_pulled
        fleet.workers[ASKING].cache.clear()


def _taking(seconds: float, start: int, count: int) -> float:
    return seconds


def test_seconds_saved_are_what_computing_would_have_taken_less_what_the_pull_took(fleet: Any) -> None:
    weigh(fleet, lambda start, count: 0.25 * count)
    start(fleet, 1, PROMPT)
    fleet.run()
    assert counts(fleet).pull_saved_s == 0.25 * len(HISTORY)  # the clock stands still


# windows


def with_windows(fleet_class: FleetClass, windows: WindowPages) -> Any:
    def model(num_pages: int) -> tuple[Any, WindowedRunner]:
        kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
        return kv, WindowedRunner(NullRunner(kv, VOCAB), kv, windows, VOCAB)

    return fleet_class(Role.UNIFIED, Role.UNIFIED, num_pages=256, model=model, windows=windows)


@pytest.mark.parametrize(
    "windows", [WindowPages(2, 10), WindowPages(1, 5), WindowPages(1, 8, is_chunked=True), WindowPages(3, 2)], ids=str
)
@pytest.mark.parametrize("num_common", [40, 35, 17])
def test_what_windows_see_behind_the_prefix_comes_with_it(
    fleet_class: FleetClass, windows: WindowPages, num_common: int
) -> None:
    fleet = with_windows(fleet_class, windows)
    fleet.start(90, HISTORY, HOLDER, HOLDER)
    fleet.run()
    prompt = [*HISTORY[:num_common], *range(500, 520)]
    start(fleet, 1, prompt)
    fleet.run()
    assert fleet.tokens(1) == expected_with_windows(prompt, 5, VOCAB, windows)
    found = fleet.workers[ASKING].outputs[1][0].stats.cached_tokens
    assert found == num_common // PAGE * PAGE if num_common == 40 else found <= num_common
    assert counts(fleet).pages_pulled == counts(fleet, HOLDER).pages_lent
    assert counts(fleet).pages_pulled >= (found // PAGE) * (found > 0)
    check_empty(fleet)


@pytest.mark.parametrize("num_common", [4, 12, 36])
def test_a_holder_whose_prefix_ends_where_more_is_seen_than_was_granted_for_gives_a_shorter_one(
    fleet_class: FleetClass, num_common: int
) -> None:
    """Behind 40 tokens nothing is seen of chunks of 8, behind 36 a page is."""
    windows = WindowPages(1, 8, is_chunked=True)

    fleet = with_windows(fleet_class, windows)
    fleet.start(90, HISTORY[:num_common], HOLDER, HOLDER)
    fleet.run()
    prompt = [*HISTORY[:num_common], *range(500, 505)]
    start(fleet, 1, prompt)
    fleet.run()
    assert fleet.tokens(1) == expected_with_windows(prompt, 5, VOCAB, windows)
    assert counts(fleet).pages_pulled == num_common // 8 * 2
    check_empty(fleet)


def test_an_answer_with_more_pages_of_windows_than_were_granted_is_wrong(fleet_class: FleetClass) -> None:
    fleet = with_windows(fleet_class, WindowPages(1, 8, is_chunked=True))
    note = ask(fleet)
    handle(fleet, ASKING, NoteArrived(HOLDER, Pulled(note.room, 9, note.generations), digest=5))
    assert counts(fleet).pulls_wrong == 1


# what goes wrong


def test_bytes_that_are_not_those_that_were_sent_are_never_found(fleet: Any) -> None:
    """Nor is that peer asked again soon."""
    note = ask(fleet)
    handle(fleet, HOLDER, NoteArrived(ASKING, note))
    fleet.deliver(HOLDER)
    fleet.workers[ASKING].kv[note.pages[3]] ^= np.uint64(1)
    fleet.run()
    assert fleet.tokens(1) == expected_output(PROMPT, 5, VOCAB)
    assert (counts(fleet).pulls_wrong, counts(fleet).pages_pulled) == (1, 0)
    start(fleet, 2, [*PROMPT[:41], 1, 2, 3])
    assert not [each for each in effects_of(fleet, ASKING) if isinstance(each, SendNote)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda note: replace(note, generations=tuple(each + 1 for each in note.generations)),
        lambda note: replace(note, generations=note.generations[:-1]),
        lambda note: replace(note, generations=note.generations[::-1]),
        lambda note: replace(note, num_pages=note.num_pages - 1),
        lambda note: replace(note, num_pages=note.num_pages + 50),
        lambda note: replace(note, num_pages=2**20, generations=()),
    ],
    ids=[
        "another grant",
        "a page short",
        "another order",
        "fewer than it names",
        "more than there are",
        "all, of none",
    ],
)
def test_a_note_that_does_not_fit_the_grant_is_wrong(fleet: Any, wrong: Callable[[Pulled], Pulled]) -> None:
    note = ask(fleet)
    answer = Pulled(note.room, len(note.pages), note.generations)
    if len(set(note.generations)) == 1:
        fleet.workers[ASKING].core._pulling._pulls[note.room].generations = tuple(range(len(note.pages)))
        answer = replace(answer, generations=tuple(range(len(note.pages))))
    handle(fleet, ASKING, NoteArrived(HOLDER, wrong(answer), digest=5))
    assert counts(fleet).pulls_wrong == 1
    fleet.run()
    assert fleet.tokens(1) == expected_output(PROMPT, 5, VOCAB)


def test_an_answer_without_a_digest_is_wrong(fleet: Any) -> None:
    note = ask(fleet)
    handle(fleet, ASKING, NoteArrived(HOLDER, Pulled(note.room, len(note.pages), note.generations), digest=None))
    assert counts(fleet).pulls_wrong == 1


def test_a_request_waits_no_longer_than_a_pull_should_take_and_its_pages_until_its_writer_stops(fleet: Any) -> None:
    asking, note = fleet.workers[ASKING], ask(fleet)
    due_s = asking.core.next_deadline_s()
    assert due_s is not None
    asking.core.expire(due_s)
    assert effects_of(fleet, ASKING) == [SendNote(HOLDER, StopPull(note.room))]
    assert asking.cache.pool.counts()["quarantined"] == 10
    fleet.run()
    assert fleet.tokens(1) == expected_output(PROMPT, 5, VOCAB)
    asking.core.expire(due_s + 1.0)
    assert effects_of(fleet, ASKING) == [SendNote(HOLDER, StopPull(note.room))], "asked again"
    handle(fleet, HOLDER, NoteArrived(ASKING, StopPull(note.room)))
    handle(fleet, HOLDER, NoteArrived(ASKING, note), 0.1)
    fleet.run()
    assert counts(fleet, HOLDER).pages_lent == 0, "what was to be stopped before it came is not written"
    assert counts(fleet).pulls_missed == 1
    check_empty(fleet)


def test_pages_of_a_lost_link_wait_until_the_peer_is_gone_or_answers_over_the_next_one(fleet: Any) -> None:
    for room, end in ((1, WriterGone(HOLDER)), (2, PeerUp(HOLDER))):
        now_s = room * 2 * MISSED_S
        holder = PrefixHolder(HOLDER, len(PROMPT))
        fleet.workers[ASKING].cache.clear()
        request_effects = _ask_at(fleet, room, holder, now_s)
        assert len(request_effects) == 1
        handle(fleet, ASKING, PeerDown(HOLDER, "cut"), now_s)
        assert fleet.workers[ASKING].core.suspects() == {HOLDER}
        fleet.run()
        assert fleet.tokens(room) == expected_output(PROMPT, 5, VOCAB)
        assert fleet.workers[ASKING].cache.pool.counts()["quarantined"] == 10
        handle(fleet, ASKING, end, now_s)
        fleet.run()
        assert fleet.workers[ASKING].cache.pool.counts()["quarantined"] == 0
        handle(fleet, ASKING, PeerUp(HOLDER), now_s)
    check_empty(fleet)


def _ask_at(fleet: Any, room: int, holder: PrefixHolder, now_s: float) -> list[Any]:
    core, handled = fleet.workers[ASKING].core, fleet.workers[ASKING].core.handle
    core.handle = lambda event, _: handled(event, now_s)
    fleet.start_leg(ASKING, room, PROMPT, LegKind.LOCAL, 0, holder=holder)
    core.handle = handled
    return [each.note for each in effects_of(fleet, ASKING) if isinstance(each, SendNote)]


def test_a_request_that_is_aborted_leaves_its_pull_alone(fleet: Any) -> None:
    note = ask(fleet)
    handle(fleet, ASKING, AbortRoom(1, "the client left"))
    handle(fleet, HOLDER, NoteArrived(ASKING, note))
    fleet.run()
    assert counts(fleet).pages_pulled == 10
    start(fleet, 2, PROMPT)
    fleet.run()
    assert fleet.workers[ASKING].outputs[2][0].stats.cached_tokens == 40
    check_empty(fleet)


# the side that lends


def test_what_is_lent_is_pinned_and_stays_until_it_is_written(fleet: Any) -> None:
    note, holder = ask(fleet), fleet.workers[HOLDER]
    handle(fleet, HOLDER, NoteArrived(ASKING, note))
    write, answer = effects_of(fleet, HOLDER)
    assert isinstance(write, WritePages)
    assert answer == SendNote(ASKING, Pulled(note.room, 10, note.generations), stream=note.room)
    assert (write.write.dst.tolist(), write.flow.with_digest) == (list(note.pages), True)
    assert holder.cache.pool.pinned(write.write.src)
    holder.cache.clear()
    assert holder.cache.pool.states(write.write.src).all(), "none is free"
    handle(fleet, HOLDER, WriteDone(note.room, None, 1))
    assert not holder.cache.pool.pinned(write.write.src)
    holder.cache.clear()
    assert holder.cache.pool.num_free == holder.cache.pool.capacity


def test_a_pull_is_answered_once_however_often_it_comes(fleet: Any) -> None:
    note = ask(fleet)
    for now_s in (0.0, KEEP_S / 2, 2 * KEEP_S):
        handle(fleet, HOLDER, NoteArrived(ASKING, note), now_s)
    assert len(effects_of(fleet, HOLDER)) == 2
    handle(fleet, HOLDER, WriteDone(note.room, None, 1), 2 * KEEP_S)
    handle(fleet, HOLDER, NoteArrived(ASKING, note), 2.5 * KEEP_S)
    assert not effects_of(fleet, HOLDER)


def test_no_peer_has_a_holder_remember_more_than_so_many_pulls(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "MAX_KEPT", 20)
    for number in range(1, 100):
        handle(fleet, HOLDER, NoteArrived(ASKING, StopPull(number)))
    assert len(fleet.workers[HOLDER].core._lending._over) == 20


@pytest.mark.parametrize("error", [None, "the link is slow"])
def test_no_more_writes_is_said_only_when_every_write_has_ended(fleet: Any, error: str | None) -> None:
    note = ask(fleet)
    handle(fleet, HOLDER, NoteArrived(ASKING, note))
    effects_of(fleet, HOLDER)
    handle(fleet, HOLDER, NoteArrived(ASKING, StopPull(note.room)))
    assert not effects_of(fleet, HOLDER)
    handle(fleet, HOLDER, WriteDone(note.room, error, None))
    assert effects_of(fleet, HOLDER) == [SendNote(ASKING, Pulled(note.room, 0, ()))]


def test_a_holder_writes_so_many_at_a_time_and_refuses_others(fleet: Any) -> None:
    note = ask(fleet)
    for number in range(MAX_LENT + 1):
        handle(fleet, HOLDER, NoteArrived(ASKING, replace(note, room=1000 + number)))
    answers = [each.note for each in effects_of(fleet, HOLDER) if isinstance(each, SendNote)]
    assert [each.num_pages for each in answers if isinstance(each, Pulled)] == [10] * MAX_LENT + [0]


def test_a_pull_is_refused_that_grants_other_pages_than_it_asks_for_or_has_the_number_of_a_room(fleet: Any) -> None:
    note = ask(fleet)
    fleet.start_leg(HOLDER, 77, [1, 2, 3], LegKind.DECODE, ASKING)
    fleet.deliver(HOLDER)
    for wrong in (
        replace(note, room=77),
        replace(note, room=1001, pages=note.pages[1:]),
        replace(note, room=1002, first_token=40),
        replace(note, room=1003, page_size=2),
    ):
        handle(fleet, HOLDER, NoteArrived(ASKING, wrong))
        (answer,) = effects_of(fleet, HOLDER)
        assert answer.note.num_pages == 0
        assert answer.note.refusal


def test_pulls_leave_half_of_the_pool(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.PREFILL, Role.DECODE, num_pages=64)
    long = list(range(35 * PAGE))
    start_leg = fleet.start_leg
    start_leg(ASKING, 1, long, LegKind.PREFILL, HOLDER, holder=PrefixHolder(HOLDER, len(long)))
    assert not effects_of(fleet, ASKING)
    start_leg(ASKING, 2, long[: 31 * PAGE], LegKind.PREFILL, HOLDER, holder=PrefixHolder(HOLDER, len(long)))
    assert len(effects_of(fleet, ASKING)) == 1


def test_the_number_of_a_pull_is_another_than_that_of_its_room_and_never_zero() -> None:
    numbers = {pull_id(room) for room in range(1, 1000)}
    assert len(numbers) == 999
    assert not numbers & set(range(1000))


# prices


def test_a_pull_costs_what_its_link_takes_and_what_is_before_it() -> None:
    prices = PullPrices()
    prices.linked(1, 1e6)
    alone_s = prices.load_s(1, 1_000_000, 0.0)
    assert alone_s == pytest.approx(1.003)
    assert prices.began(1, 2_000_000) == 0
    assert prices.load_s(1, 1_000_000, 0.0) == pytest.approx(3.003)
    assert prices.began(1, 1_000_000) == 2_000_000
    prices.ended(1, 1_000_000)
    prices.came(1, 3_000_000, 3.003, 0.0)
    assert prices.load_s(1, 1_000_000, 0.0) == pytest.approx(3.003), "it waited for those before it, as was expected"
    prices.ended(1, 2_000_000)
    assert prices.load_s(1, 1_000_000, 0.0) == pytest.approx(alone_s)


def test_a_peer_whose_pulls_take_longer_than_its_link_lets_expect_becomes_dearer() -> None:
    prices = PullPrices()
    prices.linked(1, 1e6)
    for _ in range(40):
        prices.came(1, 1_000_000, 4.0, 100.0)
    assert prices.load_s(1, 1_000_000, 100.0) == pytest.approx(4.0, rel=0.01)


def test_one_late_pull_makes_no_peer_dear_for_ever_and_a_new_link_begins_anew() -> None:
    prices = PullPrices()
    prices.linked(1, 1e9)
    alone_s = prices.load_s(1, 1_000_000, 0.0)
    prices.came(1, 1_000_000, 1000 * alone_s, 0.0)
    assert alone_s < prices.load_s(1, 1_000_000, 0.0) < OUTLIER * alone_s
    assert prices.load_s(1, 1_000_000, 8 * HALF_LIFE_S) == pytest.approx(alone_s, rel=0.05)
    prices.linked(1, 1e9)
    assert prices.load_s(1, 1_000_000, 0.0) == alone_s


def test_what_a_pull_took_is_compared_with_all_that_was_asked_for_before_it(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[int] = []
    monkeypatch.setattr(PullPrices, "came", lambda self, peer, num_bytes, took_s, now_s: came.append(num_bytes))
    for room, prompt in ((1, PROMPT), (2, PROMPT[::-1])):
        start(fleet, room, prompt)
    for sent in effects_of(fleet, ASKING):
        note = sent.note
        handle(fleet, ASKING, NoteArrived(HOLDER, Pulled(note.room, 10, note.generations), digest=5))
        handle(fleet, ASKING, PagesDigested(note.room, 5))
    assert came == [10 * PAGE * 8, 20 * PAGE * 8]


def test_peers_that_are_gone_are_forgotten_once_nothing_of_them_counts_any_more(fleet: Any) -> None:
    pulling = fleet.workers[ASKING].core._pulling
    note = ask(fleet)
    for peer in range(10, 20):
        handle(fleet, ASKING, PeerUp(peer, lands_in_parts=True))
    for peer in (HOLDER, *range(10, 19)):
        handle(fleet, ASKING, PeerDown(peer, "it left"))
    assert set(pulling._prices._peers) == {HOLDER, 19}, "of one a pull is in quarantine, and one is linked"
    assert pulling._in_parts == {19}
    handle(fleet, ASKING, NoteArrived(HOLDER, Pulled(note.room, 0, ())))
    handle(fleet, ASKING, PeerDown(19, "it left"), MISSED_S / 2)
    assert set(pulling._prices._peers) == {HOLDER}, "it is left alone"
    handle(fleet, ASKING, PeerDown(19, "it left"), MISSED_S)
    assert not pulling._prices._peers


def test_a_digest_that_could_not_be_computed_is_a_miss(fleet: Any) -> None:
    note = ask(fleet)
    handle(fleet, ASKING, NoteArrived(HOLDER, Pulled(note.room, len(note.pages), note.generations), digest=5))
    effects_of(fleet, ASKING)
    handle(fleet, ASKING, PagesDigested(note.room, None))
    assert counts(fleet).pulls_wrong == 1
    fleet.run()
    assert fleet.tokens(1) == expected_output(PROMPT, 5, VOCAB)
