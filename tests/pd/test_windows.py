"""Pages of layers with a window between the cores of a pair: live ones handed over, others given up, none mixed up."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from null_runner import NullRunner
from windowed_runner import WindowedRunner, expected_output

from diptych.decode.room import DecodeRoom
from diptych.engine.values.window_pages import WindowPages
from diptych.kvtransfer.notes import HandOff

VOCAB = 1000
PAGE = 4
SLIDING = WindowPages(2, 10)
CHUNKED = WindowPages(1, 8, is_chunked=True)
KINDS = pytest.mark.parametrize("windows", [SLIDING, WindowPages(1, 4), WindowPages(3, 2), CHUNKED], ids=str)
Pair = Any  # the fixture's class: test helpers can't be imported


def windowed_model(num_pages: int, windows: WindowPages) -> tuple[Any, WindowedRunner]:
    kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
    return kv, WindowedRunner(NullRunner(kv, VOCAB), kv, windows, VOCAB)


def pair_of(make_pair: type[Pair], windows: WindowPages, **settings: Any) -> Pair:
    return make_pair(model=partial(windowed_model, windows=windows), windows=windows, **settings)


@KINDS
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 16, 17, 33, 40])
def test_only_what_is_live_behind_the_prompt_is_handed_over(
    make_pair: type[Pair], windows: WindowPages, prompt_len: int
) -> None:
    pair, prompt = pair_of(make_pair, windows, decode_pages=128, prefill_pages=128), list(range(1, prompt_len + 1))
    pair.start(1, prompt, max_tokens=30)
    pair.run()
    assert pair.tokens(1) == expected_output(prompt, 30, VOCAB, windows)
    num_live = -(-prompt_len // PAGE) - windows.live_from(prompt_len // PAGE * PAGE) // PAGE
    assert pair.num_written == -(-prompt_len // PAGE) + windows.num_groups * num_live
    pair.assert_clean()


@KINDS
def test_a_request_holds_no_more_than_its_windows_while_it_runs(make_pair: type[Pair], windows: WindowPages) -> None:
    pair, held = pair_of(make_pair, windows, decode_pages=256, prefill_pages=256), []
    pair.check = lambda: held.append(pair.decode.cache.pool.capacity - pair.decode.cache.num_available)
    pair.start(1, [5] * 20, max_tokens=150)
    pair.run()
    assert pair.tokens(1) == expected_output([5] * 20, 150, VOCAB, windows)
    of_tokens, of_windows = -(-170 // PAGE), windows.num_groups * (-(-windows.window // PAGE) + 2)
    assert of_tokens < max(held) <= of_tokens + of_windows


@KINDS
def test_a_prompt_that_goes_on_begins_behind_the_last_whole_page_of_the_one_before(
    make_pair: type[Pair], windows: WindowPages
) -> None:
    pair, prompt = pair_of(make_pair, windows), list(range(1, 22))
    pair.start(1, prompt, max_tokens=5)
    pair.run()
    computed = pair.prefill.runner.num_tokens
    pair.start(2, [*prompt, 77, 78, 79], max_tokens=5)
    pair.run()
    assert pair.tokens(2) == expected_output([*prompt, 77, 78, 79], 5, VOCAB, windows)
    assert pair.prefill.runner.num_tokens - computed == 4  # the token behind the last whole page, and the new ones
    pair.assert_clean()


@KINDS
@pytest.mark.parametrize("overlap", [False, True])
def test_thousands_of_requests_with_equal_prompts_are_right_in_tiny_pools(
    make_pair: type[Pair], windows: WindowPages, overlap: bool
) -> None:
    pair = pair_of(
        make_pair,
        windows,
        prefill_pages=20 * (1 + windows.num_groups),
        decode_pages=replace(windows, step_tokens=16).pool_pages(19, PAGE) + 6,
        overlap=overlap,
        check_every=50,
    )
    rng, asked = random.Random(3), {}
    heads = [[7] * 9, [7] * 22, [8] * 12]
    for room in range(1, 250):
        prompt = [*rng.choice(heads), *(rng.randrange(VOCAB) for _ in range(rng.randrange(12)))]
        asked[room] = prompt, rng.choice([1, 2, 2, 2, 40])
        pair.start(room, *asked[room])
        if rng.random() < 0.1:
            pair.abort(rng.choice([pair.prefill, pair.decode]), room)
        for _ in range(rng.randrange(30)):
            rng.choice([pair.deliver, pair.deliver, pair.step])(rng.choice([pair.prefill, pair.decode]))
    pair.run()
    pair.close()
    ended = 0
    for room, (prompt, max_tokens) in asked.items():
        tokens = pair.tokens(room)
        assert tokens == expected_output(prompt, len(tokens), VOCAB, windows)
        ended += len(tokens) == max_tokens
    assert ended > 170
    assert pair.decode.core.report().counts.retractions > 0
    pair.assert_clean()


@KINDS
def test_a_prompt_needs_room_for_all_its_tokens_in_layers_with_a_window_a_step_at_a_time(
    make_pair: type[Pair], windows: WindowPages
) -> None:
    pair = pair_of(make_pair, windows, prefill_pages=250, decode_pages=250, context_len=1024)
    longest = pair.prefill.cache.max_request_tokens - 2
    assert longest > 2 * 250 * PAGE // (1 + windows.num_groups) or windows.num_groups == 1
    prompts = {room: [room] * (longest - 10 * room) for room in range(1, 4)}
    for room, prompt in prompts.items():
        pair.start(room, prompt, max_tokens=2)
    pair.run()
    for room, prompt in prompts.items():
        assert pair.tokens(room) == expected_output(prompt, 2, VOCAB, windows)
    pair.assert_clean()


@KINDS
def test_prompts_that_are_part_way_do_not_take_each_other_the_pages_of_their_next_steps(
    make_pair: type[Pair], windows: WindowPages, squeeze: Any
) -> None:
    """They are retracted, and computed again beside each other, where memory is short."""
    needed = replace(windows, step_tokens=8).pool_pages(21, PAGE)
    pair = pair_of(make_pair, windows, decode_pages=needed + 12, max_step_tokens=8, check_every=10**6)
    others, rng = squeeze(pair.decode.cache), random.Random(1)
    prompts = {room: [room, *range(50)] for room in range(1, 9)}
    for room, prompt in prompts.items():
        pair.start(room, prompt, max_tokens=30)
    for _ in range(600):
        rng.choice([pair.deliver, pair.step])(rng.choice([pair.prefill, pair.decode]))
        if rng.random() < 0.05:
            others.toggle()
            pair.expire()
    others.release()
    pair.expire()
    pair.run()
    for room, prompt in prompts.items():
        assert pair.tokens(room) == expected_output(prompt, 30, VOCAB, windows)
    assert pair.decode.core.report().counts.retractions > 0
    pair.assert_clean()


def test_what_windows_take_is_no_credit(make_pair: type[Pair]) -> None:
    pair = pair_of(make_pair, SLIDING, decode_pages=33)
    most = 2 * 5
    assert pair.decode.core.load().grantable_pages == 32 - most
    pair.start_decode(1, list(range(12)))  # 3 pages of tokens, and all of them live in two groups
    assert pair.decode.core.load().grantable_pages == 32 - 3 * 3 - most


@KINDS
@pytest.mark.parametrize("prompt_len", [3, 40, 200])
def test_routers_are_told_what_one_more_request_could_have_and_of_whose_tokens_pages_are(
    make_pair: type[Pair], windows: WindowPages, prompt_len: int
) -> None:
    """What windows take is neither: a long request makes no worker look fuller, or emptier, than it is."""
    pair = pair_of(make_pair, windows, decode_pages=400, prefill_pages=400)
    load, fits = pair.decode.core.load(), []
    assert load.free_pages == load.total_pages
    assert (load.free_pages - load.next_beside_pages) * PAGE == pair.decode.cache.windows.fitting(399, PAGE) * PAGE
    pair.check = lambda: fits.append(pair.decode.core.load())
    pair.start(1, list(range(prompt_len)), max_tokens=40)
    pair.run()
    pages = [load.total_pages - load.free_pages - load.window_pages for load in fits]
    assert (max(pages), pages[-1]) == (-(-(prompt_len + 39) // PAGE), 0)
    most_beside = 2 * windows.num_groups * (-(-windows.window // PAGE) + 2)  # cached ones stay while some are seen
    assert 0 < max(load.window_pages for load in fits) <= most_beside
    assert fits[-1].window_pages == 0
    fewest_left = min(load.free_pages - load.next_beside_pages for load in fits)
    assert fewest_left >= 399 - load.next_beside_pages - max(pages) - most_beside


def test_a_hand_off_says_which_tokens_of_which_groups_it_brings(
    make_pair: type[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(DecodeRoom, "refuse_hand_off", lambda self, note: seen.append(note))
    pair = pair_of(make_pair, SLIDING)
    pair.start(1, list(range(30)), max_tokens=1)
    pair.run()
    assert [(each.kind, each.first_token, each.end_token, each.num_pages) for each in seen[0].groups] == [
        ("tokens", 0, 30, 8),
        ("window", 16, 30, 2 * 4),  # a token behind 28 sees 19 and what follows
    ]


@pytest.mark.parametrize("short", [{"first_token": 22}, {"end_token": 29}, {"kind": "state"}], ids=str)
def test_decode_refuses_what_is_of_other_tokens_or_groups_than_it_granted_pages_for(
    make_pair: type[Pair], monkeypatch: pytest.MonkeyPatch, short: dict[str, Any]
) -> None:
    pair = pair_of(make_pair, SLIDING)
    plain = DecodeRoom.refuse_hand_off

    def refuse(room: DecodeRoom, note: HandOff) -> str | None:
        return plain(room, replace(note, groups=(note.groups[0], replace(note.groups[1], **short))))

    monkeypatch.setattr(DecodeRoom, "refuse_hand_off", refuse)
    pair.start(1, list(range(30)), max_tokens=3)
    pair.run()
    failure = pair.decode.ended(1).failure
    assert failure is not None
    assert "window 16 to 30 in 8 pages" in failure.message
    pair.assert_clean()
