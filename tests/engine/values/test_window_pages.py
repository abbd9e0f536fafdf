"""From where on the pages of layers with a window live, and how many do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_config import tiny_config

from diptych.engine.values.kv_regions import window_pages
from diptych.engine.values.window_pages import WindowPages

SLIDING = WindowPages(num_groups=2, window=8, step_tokens=16)
CHUNKED = replace(SLIDING, is_chunked=True)
PAGE = 4


def test_they_are_those_of_the_models_groups_and_windows() -> None:
    model = tiny_config(num_layers=6, windows=(8, 8, 0) * 2)
    assert window_pages(model, 16) == SLIDING
    assert window_pages(replace(model, chunked=True), 16) == CHUNKED


@pytest.mark.parametrize(
    ("num_tokens", "sliding", "chunked"), [(0, 0, 0), (7, 0, 0), (8, 1, 8), (9, 2, 8), (16, 9, 16)]
)
def test_what_the_next_token_sees_lives_and_nothing_before_it(num_tokens: int, sliding: int, chunked: int) -> None:
    assert (SLIDING.live_from(num_tokens), CHUNKED.live_from(num_tokens)) == (sliding, chunked)


@pytest.mark.parametrize("windows", [SLIDING, CHUNKED])
def test_no_text_has_more_live_than_is_said_and_one_that_fits_takes_no_more_than_the_pool(windows: WindowPages) -> None:
    assert max(windows.num_live(num_tokens, PAGE) for num_tokens in range(200)) <= windows.most_live(PAGE)
    for pool in range(1, 80):
        fitting = windows.fitting(pool, PAGE)
        assert windows.pool_pages(fitting, PAGE) <= pool < windows.pool_pages(fitting + 1, PAGE)
