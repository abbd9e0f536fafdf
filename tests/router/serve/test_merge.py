from __future__ import annotations

import itertools

import pytest

from diptych.generation.logprobs import TokenLogprobs
from diptych.router.serve.attempt_legs import Merger

RUNS = [(0, [10]), (1, [11]), (2, [12, 13]), (4, [14])]


def accept(merger: Merger, first_index: int, token_ids: list[int]) -> list[int]:
    merger.accept(first_index, token_ids)
    return merger.pop()[0]


@pytest.mark.parametrize("order", list(itertools.permutations(RUNS)))
def test_tokens_come_out_in_order_whatever_order_they_came_in(order: list[tuple[int, list[int]]]) -> None:
    merger = Merger()
    given = [token for first_index, run in order for token in accept(merger, first_index, run)]
    assert (given, merger.num_tokens, merger.has_gap) == ([10, 11, 12, 13, 14], 5, False)


def test_a_token_that_was_taken_is_dropped() -> None:
    merger = Merger()
    accept(merger, 0, [10, 11])
    assert accept(merger, 0, [10, 11, 12]) == [12]
    assert accept(merger, 1, [11]) == []
    assert merger.num_tokens == 3


def test_nothing_is_given_out_behind_a_gap() -> None:
    merger = Merger()
    assert accept(merger, 1, [11, 12]) == []
    assert merger.has_gap
    assert accept(merger, 0, [10]) == [10, 11, 12]
    assert not merger.has_gap


def test_an_end_without_tokens_changes_nothing() -> None:
    merger = Merger()
    accept(merger, 0, [10])
    assert accept(merger, 1, []) == []
    assert (merger.num_tokens, merger.has_gap) == (1, False)


def test_log_probabilities_stay_with_their_tokens() -> None:
    """Tokens 0 and 1 come twice, the second time cut from a run that brings token 2."""
    merger = Merger()
    merger.accept(1, [11], TokenLogprobs((-1.0,), 1, (51,), (-0.5,)))
    merger.accept(0, [10], TokenLogprobs((-0.0,), 1, (50,), (-0.1,)))
    merger.accept(0, [10, 11, 12], TokenLogprobs((-0.0, -1.0, -2.0), 1, (50, 51, 52), (-0.1, -0.5, -0.7)))
    wanted = TokenLogprobs((-0.0, -1.0, -2.0), 1, (50, 51, 52), (-0.1, -0.5, -0.7))
    assert merger.pop() == ([10, 11, 12], wanted)
    assert merger.pop() == ([], None)
