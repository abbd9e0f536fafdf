"""Prefill and decode together: whole lives of requests, undisturbed and cut short at every point."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from null_runner import expected_output

from diptych.engine.values.events import (
    AbortRoom,
    DigestPages,
    HandOffSent,
    PagesDigested,
    StreamPages,
    WriteDone,
    WritePages,
    WriterGone,
)
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.finish import Finish
from diptych.generation.output import FailureCode
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.notes import AbortAck, HandOff, PagesReady

VOCAB = 1000
PAGE = 4
PREFILL, DECODE = 11, 22

Pair = Any  # the fixture's class: test helpers can't be imported


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


@pytest.mark.parametrize("prompt_len", [1, PAGE - 1, PAGE, PAGE + 1, 15, 16, 17, 100])
def test_the_pair_generates_what_the_model_says_and_every_page_moves(pair: Pair, prompt_len: int) -> None:
    prompt = list(range(1, prompt_len + 1))
    pair.start(1, prompt, max_tokens=9)
    pair.run()
    assert pair.tokens(1) == expected_output(prompt, 9, VOCAB)
    assert pair.num_written == pages_for(prompt_len)
    assert pair.decode.ended(1).finish is Finish.LENGTH
    sent, received = pair.prefill.ended(1).stats, pair.decode.ended(1).stats
    assert (sent.pages_moved, sent.bytes_moved, sent.kv_digest) == (
        received.pages_moved,
        received.bytes_moved,
        received.kv_digest,
    )
    assert sent.pages_moved == pages_for(prompt_len)
    pair.assert_clean()


def test_a_single_token_request_moves_its_pages_and_ends_on_both_sides(pair: Pair) -> None:
    pair.start(1, [1, 2, 3], max_tokens=1)
    pair.run()
    assert pair.tokens(1) == expected_output([1, 2, 3], 1, VOCAB)
    assert pair.decode.ended(1).finish is Finish.LENGTH
    assert pair.num_written == 1
    pair.assert_clean()


def test_chunks_move_while_the_next_is_computed(pair: Pair) -> None:
    pair.start(1, list(range(60)))
    pair.deliver(pair.decode)
    pair.step(pair.prefill)
    assert pair.deliver(pair.prefill)
    assert pair.num_written == 16 // PAGE
    pair.run()
    assert pair.num_written == 60 // PAGE


def test_what_prefill_has_cached_moves_before_the_first_step_and_the_rest_behind_it(make_pair: type[Pair]) -> None:
    pair = make_pair(rules=TransferRules("always", num_windows=2))
    prompt = list(range(20))
    pair.start(1, prompt)
    pair.run()
    pair.decode.cache.clear()
    pair.start(2, [*prompt, 900, 901], max_tokens=5)
    pair.deliver(pair.decode)
    assert pair.prefill.core.plan(pair.now_s) is not None
    cached, rest = pair.prefill.core.pop_effects()
    assert (type(cached), len(cached.write.dst)) == (WritePages, 20 // PAGE)
    assert (type(rest), len(rest.write.dst)) == (StreamPages, 1)


def test_what_a_hand_off_adds_is_what_the_transfer_engine_took_not_when_its_answer_is_read(pair: Pair) -> None:
    pair.start(1, [1, 2, 3])
    pair.deliver(pair.decode)
    pair.step(pair.prefill)
    pair.prefill.core.handle(HandOffSent(1, 0.25), pair.now_s)
    pair.now_s += 3.0  # a step of the next prompt
    pair.run()
    stats = pair.prefill.ended(1).stats
    assert (stats.added_ttft_s, stats.transfer_s >= 3.0) == (0.25, True)


def test_decode_asks_only_for_the_pages_it_lacks(pair: Pair) -> None:
    prompt = list(range(40))
    pair.start(1, prompt, max_tokens=9)
    pair.run()
    history = prompt + pair.tokens(1)
    before = pair.num_written
    pair.start(2, [*history, 900, 901], max_tokens=5)
    pair.run()
    assert pair.tokens(2) == expected_output([*history, 900, 901], 5, VOCAB)
    assert pair.decode.ended(2).stats.cached_tokens == 48
    assert pair.num_written - before == pages_for(51) - 48 // PAGE
    assert pair.prefill.ended(2).stats.cached_tokens == 40
    pair.assert_clean()


@pytest.mark.parametrize("prefill_first", [True, False])
def test_the_legs_may_arrive_in_any_order(pair: Pair, prefill_first: bool) -> None:
    prompt = [3, 1, 4, 1, 5]
    if prefill_first:
        pair.start_prefill(1, prompt)
        pair.run()
        pair.start_decode(1, prompt)
    else:
        pair.start_decode(1, prompt)
        pair.run()
        pair.start_prefill(1, prompt)
    pair.run()
    assert pair.tokens(1) == expected_output(prompt, 5, VOCAB)
    pair.assert_clean()


def test_many_requests_at_once_do_not_mix(make_pair: type[Pair]) -> None:
    pair = make_pair(prefill_pages=40, decode_pages=40)
    prompts = {room: [room] * (room % 7 + 1) + list(range(room)) for room in range(1, 16)}
    for room, prompt in prompts.items():
        pair.start(room, prompt, max_tokens=4)
    pair.run()
    for room, prompt in prompts.items():
        assert pair.tokens(room) == expected_output(prompt, 4, VOCAB)
    pair.assert_clean()


def test_legs_with_different_prompts_fail_on_both_sides(pair: Pair) -> None:
    pair.start_decode(1, [1, 2, 3])
    pair.start_prefill(1, [1, 2, 4])
    pair.run()
    assert pair.prefill.ended(1).failure.code is FailureCode.INVALID
    assert pair.decode.ended(1).failure.code is FailureCode.INVALID
    pair.assert_clean()


def test_a_flipped_byte_is_caught_and_both_sides_end(pair: Pair) -> None:
    pair.corrupt_next_write = True
    pair.start(1, list(range(30)))
    pair.run()
    assert pair.decode.ended(1).failure.code is FailureCode.TRANSFER_FAILED
    assert pair.prefill.ended(1).failure.code is FailureCode.TRANSFER_FAILED
    assert pair.decode.tokens(1) == {}
    assert pair.decode.core.report().counts.integrity_failures == 1
    pair.assert_clean()


def play_until_verifying(pair: Pair, **fields: Any) -> None:
    """The hand-off is at decode; its digest is not computed yet."""
    pair.start(1, [1, 2, 3], max_tokens=9, **fields)
    pair.deliver(pair.decode)
    pair.step(pair.prefill)
    pair.deliver(pair.prefill)
    pair.deliver(pair.prefill)
    assert pair.decode.cache.pool.counts()["importing"] == 1


@pytest.mark.parametrize("who", ["decode", "prefill", "deadline"])
def test_a_request_given_up_while_it_is_verified_frees_its_pages_when_nobody_reads_them(pair: Pair, who: str) -> None:
    play_until_verifying(pair, deadline_s=5.0)
    match who:
        case "decode":
            pair.abort(pair.decode, 1)
        case "prefill":
            pair.abort(pair.prefill, 1)
            pair.deliver(pair.prefill)
        case "deadline":
            pair.now_s = 6.0
            pair.expire()
    assert pair.decode.ended(1).failure is not None
    assert pair.decode.cache.pool.counts()["quarantined"] == 1
    assert isinstance(pair.decode.outbox[0], DigestPages)
    pair.deliver(pair.decode)
    assert pair.decode.cache.pool.counts()["quarantined"] == 0
    pair.run()
    assert pair.prefill.ended(1).failure is not None
    pair.assert_clean()


def test_a_lost_prefill_does_not_touch_what_is_verified(pair: Pair) -> None:
    play_until_verifying(pair)
    pair.link_down(pair.decode)
    pair.run()
    assert pair.decode.ended(1).finish is Finish.LENGTH
    assert len(pair.decode.tokens(1)) == 8
    assert pair.decode.cache.audit(pair.decode.core.report().holders) == []


def test_pages_that_could_not_be_read_fail_their_request(pair: Pair) -> None:
    play_until_verifying(pair)
    pair.decode.outbox.clear()
    pair.decode.core.handle(PagesDigested(1, None), pair.now_s)
    pair.decode.collect()
    pair.run()
    assert "could not be read" in pair.decode.ended(1).failure.message
    assert pair.decode.core.report().counts.integrity_failures == 0
    pair.assert_clean()


@pytest.mark.parametrize(("integrity", "verified"), [("off", []), ("sampled", [16]), ("always", [1, 16, 17])])
def test_hand_offs_are_verified_as_the_rules_say(make_pair: type[Pair], integrity: Any, verified: list[int]) -> None:
    pair = make_pair(rules=TransferRules(integrity=integrity))
    for room in (1, 16, 17):
        pair.start(room, [room, 2, 3])
    pair.run()
    assert [room for room in (1, 16, 17) if pair.decode.ended(room).stats.kv_digest is not None] == verified
    pair.assert_clean()


def test_a_write_may_take_as_long_as_the_rules_and_the_requests_deadline_allow(make_pair: type[Pair]) -> None:
    pair = make_pair(rules=TransferRules(timeout_s=7.0))
    pair.start(1, [1, 2, 3])
    pair.start(2, [1, 2, 3], deadline_s=4.0, priority=3)
    pair.deliver(pair.decode)
    pair.deliver(pair.decode)
    pair.now_s = 1.0
    pair.step(pair.prefill)
    flows = [effect.flow for effect in pair.prefill.outbox if isinstance(effect, WritePages)]
    assert flows == [Flow(1, 0, 7.0, with_digest=False), Flow(2, 3, 3.0, with_digest=False)]


def test_decode_that_never_acknowledges_fails_the_request_in_time(make_pair: type[Pair]) -> None:
    pair = make_pair(rules=TransferRules(integrity="always", timeout_s=7.0))
    play_until_verifying(pair)
    pair.decode.outbox.clear()  # the digest is never computed
    pair.now_s = 6.9
    pair.expire()
    assert pair.prefill.ended(1) is None
    pair.now_s = 7.0
    pair.expire()
    failure = pair.prefill.ended(1).failure
    assert (failure.code, failure.message) == (
        FailureCode.TRANSFER_FAILED,
        "decode did not acknowledge the KV within 7 s",
    )
    assert pair.prefill.cache.pool.counts()["exporting"] == 0
    pair.run()
    assert pair.decode.ended(1).failure.code is FailureCode.TRANSFER_FAILED


def test_an_ack_that_overtakes_the_news_of_the_last_write_ends_the_room_with_it(pair: Pair) -> None:
    pair.start(1, [1, 2, 3], max_tokens=9)
    pair.deliver(pair.decode)
    pair.step(pair.prefill)
    write = pair.prefill.outbox.popleft().write
    pair.decode.kv[write.dst] = pair.prefill.kv[write.src]
    pair.run()
    assert pair.decode.ended(1).finish is Finish.LENGTH
    assert pair.prefill.cache.pool.counts()["exporting"] == 1
    pair.abort(pair.prefill, 1)  # decode has everything: too late
    assert pair.prefill.ended(1) is None
    pair.prefill.core.handle(WriteDone(1, "the link broke"), pair.now_s)
    pair.prefill.collect()
    assert pair.prefill.ended(1).finish is Finish.STOP
    pair.assert_clean()


def test_decode_without_a_link_refuses_at_once(pair: Pair) -> None:
    pair.link_down(pair.decode)
    pair.start_decode(1, [1, 2])
    assert pair.decode.ended(1).failure.code is FailureCode.PEER_LOST
    pair.assert_clean()


def test_a_grant_whose_room_never_starts_is_answered(pair: Pair) -> None:
    pair.start_decode(1, [1, 2])
    pair.run()
    pair.now_s = pair.prefill.core.next_deadline_s()
    pair.run()
    assert pair.decode.ended(1).failure.code is FailureCode.ABORTED
    pair.assert_clean()


def test_a_grant_that_waited_too_long_stays_void_even_if_it_comes_again(pair: Pair) -> None:
    pair.start_decode(1, [1, 2])
    grant = pair.decode.outbox[0]
    pair.run()
    pair.now_s = pair.prefill.core.next_deadline_s()
    pair.run()
    pair.decode.outbox.append(grant)
    pair.run()
    pair.start_prefill(1, [1, 2])
    pair.run()
    assert pair.prefill.ended(1).failure.code is FailureCode.ABORTED
    assert pair.num_written == 0
    pair.assert_clean()


def test_an_aborted_room_that_starts_late_on_prefill_fails_at_once(pair: Pair) -> None:
    pair.start_decode(1, [1, 2])
    pair.abort(pair.decode, 1)
    pair.run()
    pair.start_prefill(1, [1, 2])
    pair.run()
    assert pair.prefill.ended(1).failure.code is FailureCode.ABORTED
    pair.assert_clean()


def test_quarantine_lasts_until_prefill_says_that_no_more_writes_come(pair: Pair) -> None:
    pair.start(1, list(range(40)))
    pair.deliver(pair.decode)
    pair.step(pair.prefill)  # the first chunk's write is on its way
    pair.abort(pair.decode, 1)
    assert pair.decode.cache.pool.counts()["quarantined"] == 10
    pair.deliver(pair.decode)  # Abort reaches prefill, whose write has not landed
    assert [type(effect).__name__ for effect in pair.prefill.outbox] == ["WritePages"]
    assert pair.decode.cache.pool.counts()["quarantined"] == 10
    pair.deliver(pair.prefill)
    assert [effect.note for effect in pair.prefill.outbox] == [AbortAck(1)]
    pair.deliver(pair.prefill)
    assert pair.decode.cache.pool.counts()["quarantined"] == 0
    pair.assert_clean()


def test_source_pages_stay_pinned_until_decode_acknowledges(pair: Pair) -> None:
    pair.start(1, [1, 2, 3])
    pair.deliver(pair.decode)
    pair.step(pair.prefill)
    pair.deliver(pair.prefill)  # the pages
    pair.deliver(pair.prefill)  # the hand-off
    pair.deliver(pair.decode)  # the digest
    assert pair.prefill.cache.pool.counts()["exporting"] == 1
    pair.deliver(pair.decode)
    assert pair.prefill.cache.pool.counts()["exporting"] == 0
    pair.run()
    pair.assert_clean()


def test_a_lost_prefill_leaves_pages_in_quarantine_until_it_provably_cannot_write(pair: Pair) -> None:
    pair.start(1, list(range(40)))
    pair.deliver(pair.decode)
    pair.link_down(pair.decode)
    assert pair.decode.ended(1).failure.code is FailureCode.PEER_LOST
    assert pair.decode.core.suspects() == {PREFILL}
    assert pair.decode.cache.pool.counts()["quarantined"] == 10
    pair.decode.core.handle(WriterGone(PREFILL), pair.now_s)
    assert pair.decode.cache.pool.counts()["quarantined"] == 0
    assert pair.decode.core.suspects() == set()


def test_a_link_that_comes_back_settles_the_quarantine(pair: Pair) -> None:
    pair.start(1, list(range(40)))
    pair.deliver(pair.decode)
    pair.link_down(pair.decode)
    pair.link_up()
    pair.run()
    assert pair.prefill.ended(1).failure is not None
    pair.assert_clean()


def test_a_lost_prefill_does_not_touch_what_decode_already_runs(pair: Pair) -> None:
    pair.start(1, [1, 2, 3], max_tokens=20)
    while not pair.decode.tokens(1):
        pair.deliver(pair.decode)
        pair.step(pair.prefill)
        pair.deliver(pair.prefill)
        pair.step(pair.decode)
    pair.link_down(pair.decode)
    pair.run()
    assert pair.tokens(1) == expected_output([1, 2, 3], 20, VOCAB)


def test_a_lost_decode_fails_its_rooms_and_frees_prefill(pair: Pair) -> None:
    pair.start(1, list(range(40)))
    pair.start(2, [1, 2, 3])
    pair.deliver(pair.decode)
    pair.deliver(pair.decode)
    pair.step(pair.prefill)
    pair.link_down(pair.prefill)
    for room in (1, 2):
        assert pair.prefill.ended(room).failure.code in (FailureCode.PEER_LOST, FailureCode.TRANSFER_FAILED)
    assert pair.prefill.core.report().num_open_rooms == 0
    assert pair.prefill.cache.pool.counts()["exporting"] == 0


def expect_short_outputs(pair: Pair) -> None:
    """Decode learns that outputs are short, admits too much, and has to retract."""
    for room in range(1000, 1020):
        pair.start(room, [room - 1000], max_tokens=2)
    pair.run()


def test_out_of_memory_on_decode_retracts_and_goes_on_there(make_pair: type[Pair]) -> None:
    pair = make_pair(decode_pages=10)
    expect_short_outputs(pair)
    prompts = {room: [room * 10 + i for i in range(6)] for room in (1, 2, 3)}
    for room, prompt in prompts.items():
        pair.start(room, prompt, max_tokens=20)
    pair.run()
    assert pair.decode.core.report().counts.retractions > 0
    for room, prompt in prompts.items():
        assert pair.tokens(room) == expected_output(prompt, 20, VOCAB)
        assert pair.decode.ended(room).finish is Finish.LENGTH
    pair.assert_clean()


def test_a_retracted_request_that_gets_no_memory_in_time_can_be_replayed(make_pair: type[Pair]) -> None:
    pair = make_pair(decode_pages=9)
    expect_short_outputs(pair)
    prompts = {room: [room * 10 + i for i in range(10)] for room in (1, 2)}
    for room, prompt in prompts.items():
        pair.start(room, prompt, max_tokens=20)
    while not pair.decode.core.report().counts.retractions:
        assert any(
            [pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill), pair.step(pair.decode)]
        )
    due_s = pair.decode.core.next_deadline_s()
    assert due_s is not None
    pair.now_s = due_s
    pair.run()
    (lost,) = [room for room in prompts if pair.decode.ended(room).failure]
    assert pair.decode.ended(lost).failure.code is FailureCode.RETRACTED
    tokens = pair.tokens(lost)
    pair.start(lost + 100, prompts[lost] + tokens, max_tokens=20 - len(tokens))
    pair.run()
    assert tokens + pair.tokens(lost + 100) == expected_output(prompts[lost], 20, VOCAB)
    pair.assert_clean()


def moves(pair: Pair) -> list[Any]:
    """One fixed way through a request's life, a move at a time."""
    return [
        lambda: pair.deliver(pair.decode),
        lambda: pair.step(pair.prefill),
        lambda: pair.deliver(pair.prefill),
        lambda: pair.step(pair.prefill),
        lambda: pair.step(pair.prefill),
        lambda: pair.deliver(pair.prefill),
        lambda: pair.deliver(pair.prefill),
        lambda: pair.deliver(pair.prefill),  # the hand-off
        lambda: pair.deliver(pair.decode),  # the digest
        lambda: pair.deliver(pair.decode),  # the Ack
        lambda: pair.step(pair.decode),
        lambda: pair.step(pair.decode),
    ]


CUTS = ["abort prefill", "abort decode", "abort both", "deadline", "both lose link", "decode loses link"]


@pytest.mark.parametrize(("num_moves", "cut"), list(itertools.product(range(13), CUTS)))
def test_a_request_cut_short_at_any_point_ends_once_on_both_sides(pair: Pair, num_moves: int, cut: str) -> None:
    pair.start(1, list(range(40)), max_tokens=30, deadline_s=5.0)
    for move in moves(pair)[:num_moves]:
        move()
    match cut:
        case "abort prefill":
            pair.abort(pair.prefill, 1)
        case "abort decode":
            pair.abort(pair.decode, 1)
        case "abort both":
            pair.abort(pair.decode, 1)
            pair.abort(pair.prefill, 1)
        case "deadline":
            pair.now_s = 6.0
        case "both lose link":
            pair.link_down(pair.prefill)
            pair.link_down(pair.decode)
            pair.link_up()
        case "decode loses link":
            pair.link_down(pair.decode)
            pair.link_up()
    pair.run()
    pair.now_s += 2.0  # a note may have been lost with the link: it is sent again
    pair.run()
    for side in (pair.prefill, pair.decode):
        ends = [output for output in side.outputs[1] if output.finish or output.failure]
        assert len(ends) == 1
    if pair.decode.ended(1).finish:
        assert pair.tokens(1) == expected_output(list(range(40)), 30, VOCAB)
    pair.assert_clean()


@pytest.mark.parametrize("seed", range(4))
def test_random_interleavings_with_aborts_keep_every_book_clean(make_pair: type[Pair], seed: int) -> None:
    rng = random.Random(seed)
    pair = make_pair(prefill_pages=rng.choice([30, 64]), decode_pages=rng.choice([30, 64]), max_step_tokens=8)
    prompts: dict[int, list[int]] = {}
    todo = list(range(1, 40))
    pending: list[tuple[Any, int]] = []
    for _ in range(3000):
        roll = rng.random()
        if roll < 0.05 and todo:
            room = todo.pop()
            prompts[room] = [7] * rng.randrange(12) + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
            pending += [(pair.start_prefill, room), (pair.start_decode, room)]
        elif roll < 0.12 and pending:
            start, room = pending.pop(rng.randrange(len(pending)))
            start(room, prompts[room], 6)
        elif roll < 0.14 and prompts:
            pair.abort(rng.choice([pair.prefill, pair.decode]), rng.choice(list(prompts)))
        else:
            rng.choice([pair.step, pair.deliver])(rng.choice([pair.prefill, pair.decode]))
    for start, room in pending:
        start(room, prompts[room], 6)
    pair.run()
    pair.now_s += 60.0  # grants and tombstones of rooms whose other leg was aborted before it started
    pair.run()
    finished = 0
    for room, prompt in prompts.items():
        ended = pair.decode.ended(room)
        if ended is not None and ended.finish:
            assert pair.tokens(room) == expected_output(prompt, 6, VOCAB)
            finished += 1
        else:
            assert pair.prefill.ended(room) is not None
    assert finished > 5
    pair.assert_clean()


@pytest.mark.parametrize("num_moves", range(13))
def test_a_link_lost_at_prefills_end_only_is_settled_by_the_routers_abort(pair: Pair, num_moves: int) -> None:
    pair.start(1, list(range(40)), max_tokens=30)
    for move in moves(pair)[:num_moves]:
        move()
    pair.link_down(pair.prefill)
    pair.run()
    pair.link_up()
    if pair.decode.ended(1) is None:
        pair.abort(pair.decode, 1)  # the router heard prefill's failure
    pair.run()
    pair.now_s += 2.0
    pair.run()
    assert pair.decode.ended(1) is not None
    pair.assert_clean()


def test_a_duplicate_note_changes_nothing(pair: Pair) -> None:
    pair.start(1, [1, 2, 3], max_tokens=3)
    grant = pair.decode.outbox[0]
    assert isinstance(grant.note, PagesReady)
    pair.decode.outbox.append(grant)
    pair.deliver(pair.decode)
    pair.deliver(pair.decode)
    pair.step(pair.prefill)
    pair.deliver(pair.prefill)
    hand_off = pair.prefill.outbox[0]
    assert isinstance(hand_off.note, HandOff)
    pair.prefill.outbox.append(hand_off)
    pair.deliver(pair.prefill)
    pair.deliver(pair.prefill)  # while the first is verified
    pair.deliver(pair.decode)
    pair.decode.outbox.append(pair.decode.outbox[0])  # a second Ack
    pair.run()
    assert pair.tokens(1) == expected_output([1, 2, 3], 3, VOCAB)
    pair.assert_clean()


def test_decode_advertises_no_credit_while_a_request_waits_for_pages(make_pair: type[Pair]) -> None:
    pair = make_pair(decode_pages=9)
    assert pair.decode.core.load().grantable_pages == 8
    pair.start_decode(1, list(range(20)))
    assert pair.decode.core.load().grantable_pages == 3
    assert pair.decode.core.load().num_ungranted == 0
    pair.start_decode(2, list(range(100, 120)))
    assert pair.decode.core.load().grantable_pages == 0
    assert pair.decode.core.load().num_ungranted == 1
    pair.decode.core.handle(AbortRoom(2, "enough"), pair.now_s)
    assert pair.decode.core.load().grantable_pages == 3


def test_the_age_of_the_oldest_page_in_quarantine_is_known(pair: Pair) -> None:
    assert pair.decode.core.report().quarantined_since_s is None
    pair.start_decode(1, list(range(20)))
    pair.decode.core.handle(AbortRoom(1, "enough"), 5.0)
    pair.decode.core.expire(5.0)
    pair.decode.core.expire(7.0)
    assert pair.decode.core.report().quarantined_since_s == 5.0
