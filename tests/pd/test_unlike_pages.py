"""Pairs whose pages are of two sizes, where layers keep something else than all tokens: windows, or states."""

from __future__ import annotations

from typing import Any

import pytest
from recurrent_runner import expected_output as with_state
from unlike_pages import CHUNKED, NUM_CELLS, SLIDING, VOCAB, are_right, num_ended, play, recurrent, windowed
from windowed_runner import expected_output as with_windows

from diptych.engine.values.window_pages import WindowPages

SIZES = [(4, 8), (8, 4), (3, 5), (8, 1), (2, 16)]
Pair = Any  # the fixture's class: test helpers can't be imported
sizes = pytest.mark.parametrize("page_sizes", SIZES, ids=str)


@sizes
@pytest.mark.parametrize("windows", [SLIDING, WindowPages(1, 1), CHUNKED], ids=str)
@pytest.mark.parametrize("prompt_len", [7, 16, 33])
def test_what_is_seen_behind_a_prompt_is_sent_to_pages_of_another_size(
    make_pair: type[Pair], windows: WindowPages, page_sizes: tuple[int, int], prompt_len: int
) -> None:
    pair, prompt = windowed(make_pair, windows, page_sizes, 400), list(range(1, prompt_len + 1))
    pair.start(1, prompt, max_tokens=30)
    pair.run()
    assert pair.tokens(1) == with_windows(prompt, 30, VOCAB, windows)
    size = page_sizes[1]
    assert pair.num_written == -(-prompt_len // size) + windows.num_live(prompt_len, size)
    pair.assert_clean()


@sizes
@pytest.mark.parametrize("prompt_len", [1, 16, 33])
def test_a_state_goes_byte_by_byte_to_pages_of_another_size(
    make_pair: type[Pair], page_sizes: tuple[int, int], prompt_len: int
) -> None:
    pair, prompt = recurrent(make_pair, page_sizes, 200), list(range(1, prompt_len + 1))
    pair.start(1, prompt, max_tokens=9)
    pair.run()
    assert pair.tokens(1) == with_state(prompt, 9, VOCAB, NUM_CELLS)
    assert pair.num_written == -(-prompt_len // page_sizes[1]) - (-NUM_CELLS // page_sizes[1])
    pair.assert_clean()


@pytest.mark.parametrize(("windows", "page_sizes"), [(SLIDING, (4, 8)), (SLIDING, (8, 4)), (CHUNKED, (3, 5))], ids=str)
def test_many_requests_with_windows_are_right_in_tiny_pools_also_where_they_were_retracted(
    make_pair: type[Pair], windows: WindowPages, page_sizes: tuple[int, int]
) -> None:
    """Decode caches no page of a window that it got in part: who is retracted begins before it."""
    pair = windowed(make_pair, windows, page_sizes, 66, check_every=50)
    asked = play(pair, 130)
    assert are_right(pair, asked, windows)
    assert num_ended(pair, asked) > 85
    assert pair.decode.core.report().counts.retractions > 0
    pair.assert_clean()


@pytest.mark.parametrize("page_sizes", [(4, 8), (8, 4), (3, 5)], ids=str)
def test_many_requests_with_states_are_right_in_tiny_pools_also_where_they_were_retracted(
    make_pair: type[Pair], page_sizes: tuple[int, int]
) -> None:
    pair = recurrent(make_pair, page_sizes, 90, check_every=50)
    asked = play(pair, 200)
    assert are_right(pair, asked)
    assert num_ended(pair, asked) > 130
    assert pair.decode.core.report().counts.retractions > 0
    pair.assert_clean()
