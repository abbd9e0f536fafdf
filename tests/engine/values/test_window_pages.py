"""Which pages of a text are live, against a count of what each later token sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_config import tiny_config

from diptych.engine.values.kv_regions import window_pages
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages

KINDS = [WindowPages(1, 1), WindowPages(2, 4), WindowPages(1, 5), WindowPages(3, 10), WindowPages(2, 64)]
CHUNKED = [WindowPages(1, 8, is_chunked=True), WindowPages(2, 6, is_chunked=True)]


def seen(windows: WindowPages, position: int) -> range:
    """Return what the token at a position sees, itself among it."""
    first = position // windows.window * windows.window if windows.is_chunked else position - windows.window + 1
    return range(max(0, first), position + 1)


def test_they_are_those_of_the_models_groups_and_windows() -> None:
    model = tiny_config(num_layers=6, windows=(8, 8, 0) * 2)
    assert window_pages(model, 16) == WindowPages(num_groups=2, window=8, step_tokens=16)
    assert window_pages(replace(model, chunked=True), 16).is_chunked
    assert window_pages(replace(model, keeps_all=True), 16) == NO_WINDOWS


@pytest.mark.parametrize("windows", [*KINDS, *CHUNKED], ids=str)
def test_live_is_what_some_later_token_sees(windows: WindowPages) -> None:
    for num_tokens in range(70):
        later = [token for position in range(num_tokens, num_tokens + 80) for token in seen(windows, position)]
        assert windows.live_from(num_tokens) == min(later)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("windows", [*KINDS, *CHUNKED], ids=str)
def test_the_first_live_page_has_what_is_seen_behind_the_last_whole_page_and_no_page_before_it_does(
    windows: WindowPages, page_size: int
) -> None:
    for num_tokens in range(70):
        whole = num_tokens // page_size * page_size
        oldest = min(token for position in range(whole, whole + 80) for token in seen(windows, position))
        assert windows.first_live(num_tokens, page_size) == oldest // page_size
        num_live = -(-num_tokens // page_size) - oldest // page_size
        assert windows.num_live(num_tokens, page_size) == windows.num_groups * num_live


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("windows", [*KINDS, *CHUNKED], ids=str)
def test_a_first_live_page_is_passed_with_no_fewer_whole_pages_than_is_said(
    windows: WindowPages, page_size: int
) -> None:
    fewest, is_exact = windows.fewest_passed(page_size), not windows.is_chunked or windows.window % page_size == 0
    for before in range(70):
        first = windows.first_live(before, page_size)
        for later in range(before, before + 80):
            is_passed, may_be = windows.first_live(later, page_size) > first, later // page_size - first >= fewest
            assert may_be if is_passed else not (may_be and is_exact)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("windows", [*KINDS, *CHUNKED], ids=str)
def test_no_text_that_grows_token_by_token_has_more_live_pages_than_is_said(
    windows: WindowPages, page_size: int
) -> None:
    most = max(windows.num_live(num_tokens, page_size) for num_tokens in range(200))
    assert most <= windows.most_live(page_size) <= most + 3 * windows.num_groups


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 64])
@pytest.mark.parametrize("windows", [*KINDS, *CHUNKED], ids=str)
def test_the_longest_text_that_fits_takes_no_more_than_there_is_and_leaves_less_than_a_page_of_all_groups(
    windows: WindowPages, step_tokens: int
) -> None:
    windows = WindowPages(windows.num_groups, windows.window, windows.is_chunked, step_tokens)
    for pool_pages in range(1, 150):
        fitting = windows.fitting(pool_pages, 4)
        assert windows.pool_pages(fitting, 4) <= pool_pages <= windows.pool_pages(fitting, 4) + windows.num_groups


def test_without_windows_a_page_is_a_page() -> None:
    assert NO_WINDOWS.most_live(4) == 0
    assert [NO_WINDOWS.pool_pages(number, 4) for number in (0, 1, 50)] == [0, 1, 50]
    assert NO_WINDOWS.fitting(33, 4) == 33
