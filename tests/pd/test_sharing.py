"""Requests with equal prefixes that run at the same time: computed, sent and held once.

The bounds are those of the distinct tokens, and a page for each request: its last token is always computed, and the
page with that token is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from null_runner import expected_output

from diptych.decode.grants import PATIENCE_S
from diptych.engine.schedule.aside import MAX_ASIDE
from diptych.engine.schedule.prefixes_in_flight import PrefixesInFlight
from diptych.engine.values.events import HandBack
from diptych.engine.values.limits import Scheduling
from diptych.generation.page_hash import extra_key

VOCAB = 1000
PAGE = 4
PROMPT = list(range(1, 129))
NUM_PAGES = len(PROMPT) // PAGE

Pair = Any  # the fixture's class: test helpers can't be imported
NewPair = Callable[..., Pair]


def large(make_pair: NewPair, **options: Any) -> Pair:
    return make_pair(**{"prefill_pages": 512, "decode_pages": 512, **options})


def finish(pair: Pair, prompts: Sequence[list[int]], max_tokens: int = 5) -> None:
    """Run to the end; all answers are right and nothing is held."""
    pair.run()
    for room, prompt in enumerate(prompts, start=1):
        assert pair.tokens(room) == expected_output(prompt, max_tokens, VOCAB)
    pair.assert_clean()


@pytest.mark.parametrize("max_step_tokens", [4, 16, 64, 512])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_burst_of_equal_prompts_costs_one(make_pair: NewPair, max_step_tokens: int, overlap: bool) -> None:
    pair = large(make_pair, max_step_tokens=max_step_tokens, overlap=overlap)
    for room in range(1, 9):
        pair.start(room, PROMPT)
    finish(pair, [PROMPT] * 8)
    pair.close()
    assert pair.prefill.runner.num_tokens <= len(PROMPT) + 8 * PAGE
    assert pair.num_written <= NUM_PAGES + 8
    assert pair.most_held <= NUM_PAGES + 2 * 8  # and one for the output


@pytest.mark.parametrize("num_requests", [64, MAX_ASIDE])
def test_a_burst_of_very_many_equal_prompts_is_sent_once(make_pair: NewPair, num_requests: int) -> None:
    pair = large(make_pair, check_every=100)
    for room in range(1, num_requests + 1):
        pair.start(room, PROMPT, max_tokens=2)
    finish(pair, [PROMPT] * num_requests, max_tokens=2)
    assert pair.prefill.runner.num_tokens <= len(PROMPT) + num_requests * PAGE
    assert pair.num_written <= NUM_PAGES + num_requests


def test_those_that_wait_are_not_looked_for_again_at_each_event(
    make_pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = large(make_pair)
    for room in range(1, 101):
        pair.start_decode(room, PROMPT)
    monkeypatch.setattr(PrefixesInFlight, "longest", None)
    pair.abort(pair.decode, 200)
    pair.expire()
    assert pair.decode.core.load().num_ungranted == 99


def test_a_prompt_that_comes_while_an_equal_one_decodes_is_not_sent_again(make_pair: NewPair) -> None:
    pair = large(make_pair)
    pair.start(1, PROMPT, max_tokens=100)
    while len(pair.tokens(1)) < 3:
        pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill), pair.step(pair.decode)
    for room in range(2, 9):
        pair.start(room, PROMPT, max_tokens=100)
    finish(pair, [PROMPT] * 8, max_tokens=100)
    assert pair.prefill.runner.num_tokens <= len(PROMPT) + 8 * PAGE
    assert pair.num_written <= NUM_PAGES + 8
    assert [pair.decode.ended(room).stats.cached_tokens for room in (1, 2, 8)] == [0, 124, 124]


@pytest.mark.parametrize("prefix_len", [96, 98])
def test_only_what_differs_is_computed_and_sent_behind_a_shared_prefix(make_pair: NewPair, prefix_len: int) -> None:
    pair = large(make_pair)
    prompts = [[*PROMPT[:prefix_len], *range(200 + 30 * room, 230 + 30 * room)] for room in range(6)]
    for room, prompt in enumerate(prompts, start=1):
        pair.start(room, prompt)
    finish(pair, prompts)
    distinct = prefix_len + 6 * 30
    assert pair.prefill.runner.num_tokens <= distinct + 6 * PAGE
    assert pair.num_written <= distinct // PAGE + 2 * 6


def test_nothing_is_shared_across_salts_and_adapters(make_pair: NewPair) -> None:
    pair = large(make_pair)
    keys = [extra_key(b"", ""), extra_key(b"a", ""), extra_key(b"b", ""), extra_key(b"", "adapter")]
    for room, key in enumerate(keys, start=1):
        pair.start(room, PROMPT, extra_key=key)
    finish(pair, [PROMPT] * len(keys))
    assert pair.prefill.runner.num_tokens == len(keys) * len(PROMPT)
    assert pair.num_written == len(keys) * NUM_PAGES


@pytest.mark.parametrize("sides", [("prefill",), ("decode",), ("prefill", "decode")])
@pytest.mark.parametrize("num_moves", range(0, 60, 6))
def test_those_that_wait_go_on_when_the_one_that_computes_is_aborted(
    make_pair: NewPair, sides: Sequence[str], num_moves: int
) -> None:
    pair = large(make_pair)
    for room in range(1, 5):
        pair.start(room, PROMPT)
    for _ in range(num_moves):
        pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill)
    for side in sides:
        pair.abort(getattr(pair, side), 1)
    pair.run()
    for room in range(2, 5):
        assert pair.tokens(room) == expected_output(PROMPT, 5, VOCAB)
    assert pair.prefill.runner.num_tokens <= len(PROMPT) + 4 * PAGE  # what it had computed is there
    assert pair.num_written <= 2 * NUM_PAGES + 4
    if pair.prefill.ended(1) and pair.decode.ended(1):
        pair.assert_clean()


@pytest.mark.parametrize("end", ["handed back", "too late", "refused by decode"])
@pytest.mark.parametrize("num_moves", [0, 1, 3, 6])
def test_those_that_wait_go_on_however_the_one_that_computes_ends(make_pair: NewPair, end: str, num_moves: int) -> None:
    pair = large(make_pair)
    pair.start(1, PROMPT, deadline_s=1.0 if end == "too late" else None)
    for room in range(2, 5):
        pair.start(room, PROMPT)
    for _ in range(num_moves):
        pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill)
    match end:
        case "handed back":
            for side in (pair.prefill, pair.decode):
                side.core.handle(HandBack(1), pair.now_s)
                side.collect()
        case "too late":
            pair.now_s = 1.0
        case "refused by decode":
            pair.corrupt_next_write = True
    pair.run()
    for room in range(2, 5):
        assert pair.tokens(room) == expected_output(PROMPT, 5, VOCAB)
    assert pair.decode.ended(1).failure is not None
    assert pair.prefill.runner.num_tokens <= len(PROMPT) + 4 * PAGE
    assert pair.num_written <= 2 * NUM_PAGES + 4
    pair.assert_clean()


def test_a_computed_prompt_is_kept_when_decode_dies_before_it_has_acknowledged_it(make_pair: NewPair) -> None:
    pair = large(make_pair)
    pair.start(1, PROMPT)
    pair.deliver(pair.decode)
    while pair.step(pair.prefill):
        pass
    assert len(pair.tokens(1)) == 1  # it is computed, and on its way
    pair.link_down(pair.prefill)
    assert pair.prefill.cache.pool.counts()["cached"] == NUM_PAGES
    pair.link_down(pair.decode)
    pair.link_up()
    pair.start(2, PROMPT)
    pair.run()
    assert pair.tokens(2) == expected_output(PROMPT, 5, VOCAB)
    assert pair.prefill.runner.num_tokens <= len(PROMPT) + PAGE


def test_a_request_does_not_wait_longer_for_pages_of_another_one_than_it_is_patient(make_pair: NewPair) -> None:
    pair = large(make_pair)
    pair.start_decode(1, PROMPT)  # the router never sends its prefill leg
    pair.start(2, PROMPT)
    pair.run()
    assert pair.decode.core.load().grantable_pages > 0  # nobody waits for memory
    assert pair.decode.core.next_deadline_s() == PATIENCE_S
    pair.now_s = PATIENCE_S
    pair.expire()
    pair.run()
    assert pair.tokens(2) == expected_output(PROMPT, 5, VOCAB)


def test_nobody_waits_for_pages_of_a_lower_priority(make_pair: NewPair) -> None:
    pair = large(make_pair, scheduling=Scheduling("priority"))
    pair.start_decode(1, PROMPT, priority=0)  # the router never sends its prefill leg
    pair.start(2, PROMPT, priority=1)
    pair.run()
    assert pair.tokens(2) == expected_output(PROMPT, 5, VOCAB)


def test_nobody_waits_for_a_prompt_that_goes_on_for_long_behind_what_is_shared(make_pair: NewPair) -> None:
    pair = large(make_pair, context_len=1024)
    pair.start_decode(1, [*PROMPT, *range(200, 600)])  # the router never sends its prefill leg
    pair.start(2, PROMPT)
    pair.run()
    assert pair.tokens(2) == expected_output(PROMPT, 5, VOCAB)


@pytest.mark.parametrize("page_sizes", [(4, 8), (8, 4), (16, 4)])
def test_pages_of_other_sizes_are_shared_as_well(make_pair: NewPair, page_sizes: tuple[int, int]) -> None:
    pair = large(make_pair, page_sizes=page_sizes)
    for room in range(1, 6):
        pair.start(room, PROMPT)
    finish(pair, [PROMPT] * 5)
    assert pair.prefill.runner.num_tokens <= len(PROMPT) + 5 * page_sizes[0]
    assert pair.num_written <= len(PROMPT) // page_sizes[1] + 5


def test_requests_that_share_are_retracted_and_go_on(make_pair: NewPair) -> None:
    """Not all of 8 requests with outputs of 100 tokens fit, although they share their prompt."""
    pair = make_pair(prefill_pages=64, decode_pages=120)
    for room in range(1, 9):
        pair.start(room, PROMPT, max_tokens=100)
    finish(pair, [PROMPT] * 8, max_tokens=100)
    assert pair.decode.core.report().counts.retractions > 0
    assert pair.num_written <= NUM_PAGES + 8
