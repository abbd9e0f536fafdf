"""Requests with equal prefixes, of models whose layers with a window have pages of their own: computed and held once.

As in `test_sharing`; and what is live behind each prompt is sent beside its tokens, to pages of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from null_runner import NullRunner
from windowed_runner import WindowedRunner, expected_output

from diptych.engine.values.window_pages import WindowPages

VOCAB = 1000
PAGE = 4
PROMPT = list(range(1, 129))
NUM_PAGES = len(PROMPT) // PAGE
KINDS = pytest.mark.parametrize(
    "windows", [WindowPages(2, 10), WindowPages(1, 5), WindowPages(1, 16, is_chunked=True)], ids=str
)
Pair = Any  # the fixture's class: test helpers can't be imported


def windowed_model(num_pages: int, windows: WindowPages) -> tuple[Any, WindowedRunner]:
    kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
    return kv, WindowedRunner(NullRunner(kv, VOCAB), kv, windows, VOCAB)


def large(make_pair: type[Pair], windows: WindowPages, **options: Any) -> Pair:
    model = partial(windowed_model, windows=windows)
    return make_pair(
        **{"prefill_pages": 1024, "decode_pages": 1024, "check_every": 10, **options}, model=model, windows=windows
    )


def finish(pair: Pair, windows: WindowPages, prompts: Sequence[list[int]], max_tokens: int = 5) -> None:
    """Run to the end; all answers are right and nothing is held."""
    pair.run()
    for room, prompt in enumerate(prompts, start=1):
        assert pair.tokens(room) == expected_output(prompt, max_tokens, VOCAB, windows)
    pair.assert_clean()


def num_live(windows: WindowPages, prompt: list[int]) -> int:
    return windows.num_live(len(prompt), PAGE)


@KINDS
@pytest.mark.parametrize("max_step_tokens", [4, 16, 512])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_burst_of_equal_prompts_costs_one(
    make_pair: type[Pair], windows: WindowPages, max_step_tokens: int, overlap: bool
) -> None:
    pair = large(make_pair, windows, max_step_tokens=max_step_tokens, overlap=overlap)
    for room in range(1, 9):
        pair.start(room, PROMPT)
    finish(pair, windows, [PROMPT] * 8)
    pair.close()
    assert pair.prefill.runner.num_tokens <= len(PROMPT) + 8 * PAGE
    assert pair.num_written <= NUM_PAGES + 8 + 8 * num_live(windows, PROMPT)
    of_windows = 8 * (windows.most_live(PAGE) + windows.num_groups)
    assert pair.most_held <= NUM_PAGES + 2 * 8 + 2 * of_windows  # of those that decode, and what is cached of them


@KINDS
def test_a_prompt_that_comes_while_an_equal_one_decodes_is_not_sent_again(
    make_pair: type[Pair], windows: WindowPages
) -> None:
    pair = large(make_pair, windows)
    pair.start(1, PROMPT, max_tokens=60)
    while len(pair.tokens(1)) < 3:
        pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill), pair.step(pair.decode)
    for room in range(2, 6):
        pair.start(room, PROMPT, max_tokens=60)
    finish(pair, windows, [PROMPT] * 5, max_tokens=60)
    assert pair.prefill.runner.num_tokens <= len(PROMPT) + 5 * PAGE
    assert pair.num_written <= NUM_PAGES + 5 + 5 * num_live(windows, PROMPT)
    assert [pair.decode.ended(room).stats.cached_tokens for room in (1, 2, 5)] == [0, 124, 124]


@KINDS
@pytest.mark.parametrize("prefix_len", [96, 98])
def test_only_what_differs_is_computed_and_sent_behind_a_shared_prefix(
    make_pair: type[Pair], windows: WindowPages, prefix_len: int
) -> None:
    pair = large(make_pair, windows)
    prompts = [[*PROMPT[:prefix_len], *range(200 + 30 * room, 230 + 30 * room)] for room in range(6)]
    for room, prompt in enumerate(prompts, start=1):
        pair.start(room, prompt)
    finish(pair, windows, prompts)
    distinct = prefix_len + 6 * 30
    assert pair.num_written <= distinct // PAGE + 2 * 6 + sum(num_live(windows, prompt) for prompt in prompts)
    behind_a_window = 6 * (windows.window + PAGE)  # of a text that is only shared up to the middle of a page
    assert pair.prefill.runner.num_tokens <= distinct + 6 * PAGE + behind_a_window


@KINDS
@pytest.mark.parametrize("num_moves", range(0, 60, 12))
def test_those_that_wait_go_on_when_the_one_that_computes_is_aborted(
    make_pair: type[Pair], windows: WindowPages, num_moves: int
) -> None:
    pair = large(make_pair, windows)
    for room in range(1, 5):
        pair.start(room, PROMPT)
    for _ in range(num_moves):
        pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill)
    for side in (pair.prefill, pair.decode):
        pair.abort(side, 1)
    pair.run()
    for room in range(2, 5):
        assert pair.tokens(room) == expected_output(PROMPT, 5, VOCAB, windows)
    assert pair.prefill.runner.num_tokens <= len(PROMPT) + 4 * PAGE  # what it had computed is there
    assert pair.num_written <= 2 * NUM_PAGES + 4 + 4 * num_live(windows, PROMPT)
    pair.assert_clean()


@KINDS
def test_bytes_are_those_of_what_is_live_and_not_there(make_pair: type[Pair], windows: WindowPages) -> None:
    """Each room says so of itself, and all together as they were written."""
    pair, prompts = large(make_pair, windows), [PROMPT[:90], PROMPT, [*PROMPT[:50], *range(200, 231)], PROMPT[:3]]
    expected = []
    for room, prompt in enumerate(prompts, start=1):
        there = pair.decode.cache.tree.peek(np.array(prompt[:-1], dtype=np.int64)) // PAGE
        pair.start(room, prompt)
        pair.run()
        expected.append((-(-len(prompt) // PAGE) - there + num_live(windows, prompt)) * PAGE * 8)
    assert [pair.prefill.outputs[room][0].stats.bytes_moved for room in range(1, 5)] == expected
    assert pair.num_written * PAGE * 8 == sum(expected)
    finish(pair, windows, prompts)


@KINDS
def test_requests_that_share_are_retracted_and_go_on(make_pair: type[Pair], windows: WindowPages) -> None:
    """Not all of 8 requests with outputs of 80 tokens fit, although they share their prompt."""
    num_pages = NUM_PAGES + 60 + 4 * windows.most_live(PAGE)
    pair = large(make_pair, windows, decode_pages=num_pages)
    for room in range(1, 9):
        pair.start(room, PROMPT, max_tokens=80)
    finish(pair, windows, [PROMPT] * 8, max_tokens=80)
    assert pair.decode.core.report().counts.retractions > 0
    assert pair.num_written <= NUM_PAGES + 8 + 8 * num_live(windows, PROMPT)
