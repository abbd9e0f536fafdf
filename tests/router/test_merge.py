from __future__ import annotations

import itertools

import pytest

from diptych.router.merge import Merger

RUNS = [(0, [10]), (1, [11]), (2, [12, 13]), (4, [14])]


@pytest.mark.parametrize("order", list(itertools.permutations(RUNS)))
def test_tokens_come_out_in_order_whatever_order_they_came_in(order: list[tuple[int, list[int]]]) -> None:
    merger = Merger()
    given = [token for first_index, run in order for token in merger.accept(first_index, run)]
    assert (given, merger.num_tokens, merger.has_gap) == ([10, 11, 12, 13, 14], 5, False)


def test_a_token_that_was_taken_is_dropped() -> None:
    merger = Merger()
    merger.accept(0, [10, 11])
    assert list(merger.accept(0, [10, 11, 12])) == [12]
    assert list(merger.accept(1, [11])) == []
    assert merger.num_tokens == 3


def test_nothing_is_given_out_behind_a_gap() -> None:
    merger = Merger()
    assert list(merger.accept(1, [11, 12])) == []
    assert merger.has_gap
    assert list(merger.accept(0, [10])) == [10, 11, 12]
    assert not merger.has_gap


def test_an_end_without_tokens_changes_nothing() -> None:
    merger = Merger()
    merger.accept(0, [10])
    assert list(merger.accept(1, [])) == []
    assert (merger.num_tokens, merger.has_gap) == (1, False)
