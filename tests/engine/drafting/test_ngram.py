from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diptych.engine.drafting.lookup import MAX_MATCH, MAX_PLACES, places_behind
from diptych.engine.drafting.ngram import WINDOW, NgramSource
from diptych.engine.drafting.source import NO_GUESS, Guess
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams

texts = st.integers(1, 4).flatmap(lambda most: st.lists(st.integers(0, most), min_size=1, max_size=40))


def started(prompt: list[int]) -> Request:
    return new_request(1, np.array(prompt, np.int64), SamplingParams(max_tokens=4))


@settings(deadline=None)
@given(text=texts, end=texts)
@example(text=[0, 0], end=[0, 0, 0, 0])
def test_places_are_those_behind_the_longest_part_that_is_there(text: list[int], end: list[int]) -> None:
    def behind(match: int) -> list[int]:
        return [at for at in range(match, len(text)) if text[at - match : at] == end[-match:]]

    expected = max((match for match in range(1, min(MAX_MATCH, len(end)) + 1) if behind(match)), default=0)
    places, match = places_behind(np.array(text), np.array(end), 0)
    assert match == expected
    assert places.tolist() == (behind(match) if match else [])


def test_of_many_places_the_nearest_are_compared() -> None:
    places, match = places_behind(np.ones(1000, np.int64), np.array([2, 1]), 500)
    assert match == 1
    assert places.tolist() == list(range(500 - MAX_PLACES // 2, 500 + MAX_PLACES // 2))


@pytest.mark.parametrize(
    ("text", "at_most", "guess"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 2, Guess((3, 4), (2 / 3, 2 / 4))),
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1, Guess((4,), (2 / 3,))),  # the newest
        ([1, 2, 3, 8, 2, 4, 9, 1, 2], 1, Guess((3,), (2 / 3,))),  # the longest
        ([7, 5, 6, 5, 6], 5, Guess((5, 6, 5, 6, 5), (2 / 3, 2 / 4, 2 / 5, 2 / 6, 2 / 7))),
        ([1, 2, 3, -7, -8, 1, 2], 3, Guess((3,), (2 / 3,))),
        ([1, 2, -7, -8, 1, 2], 3, NO_GUESS),
        ([1, 2, 3, 9, 2], 3, NO_GUESS),  # a single token says little
        ([1], 3, NO_GUESS),
        ([1, 2, 3], 3, NO_GUESS),
    ],
)
def test_a_request_goes_on_as_where_its_last_tokens_stood(text: list[int], at_most: int, guess: Guess) -> None:
    found = NgramSource().guess(started(text), at_most)
    assert found.token_ids == guess.token_ids
    assert found.chances == pytest.approx(guess.chances)


def test_what_lies_too_far_back_is_not_looked_for() -> None:
    middle = [0] * WINDOW
    assert NgramSource().guess(started([1, 2, 3, *middle[6:], 1, 2]), 1).token_ids == (3,)
    assert NgramSource().guess(started([1, 2, 3, *middle, 1, 2]), 1) == NO_GUESS


def test_it_keeps_nothing() -> None:
    source, request = NgramSource(), started([1, 2, 1, 2])
    assert source.guess(request, 2) == source.guess(request, 2)
    source.end(request)
    assert source.nbytes == 0
