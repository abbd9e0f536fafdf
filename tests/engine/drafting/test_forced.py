from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from diptych.common.arrays import I32
from diptych.engine.drafting.forced import CHANCE, ForcedSource
from diptych.engine.drafting.source import NO_GUESS
from diptych.engine.values.request import Request, new_request
from diptych.generation.grammar import Grammar
from diptych.generation.sampling_params import SamplingParams

VOCAB = 100


class ScriptedMatcher:
    """Forces what a test says, and counts how often it was asked."""

    is_finished = False
    error = None

    def __init__(self, forced: Sequence[int]) -> None:
        self.script = forced
        self.num_asked = 0

    def forced(self) -> Sequence[int]:
        self.num_asked += 1
        return self.script

    def accept(self, token_ids: Sequence[int]) -> None:
        raise AssertionError("a source does not change what may come")

    def fill_mask(self, mask: I32, row: int) -> None:
        raise AssertionError("a source needs no mask")

    def fill_masks(self, mask: I32, row: int, guess: Sequence[int]) -> None:
        raise AssertionError("a source needs no mask")

    def count_allowed(self, guess: Sequence[int]) -> int:
        raise AssertionError("whoever admits a guess asks that")


def started(matcher: ScriptedMatcher | None) -> Request:
    params = SamplingParams(max_tokens=100, grammar=Grammar.from_choices(["a"]) if matcher else None)
    request = new_request(1, np.array([1, 2, 3], np.int64), params)
    request.matcher = matcher
    return request


def test_forced_tokens_are_guessed() -> None:
    guess = ForcedSource(VOCAB).guess(started(ScriptedMatcher([5, 6, 7])), 2)
    assert guess.token_ids == (5, 6)
    assert guess.chances == pytest.approx([CHANCE, CHANCE**2])


def test_what_has_no_grammar_or_is_not_forced_is_not_guessed() -> None:
    assert ForcedSource(VOCAB).guess(started(None), 4) == NO_GUESS
    assert ForcedSource(VOCAB).guess(started(ScriptedMatcher([])), 4) == NO_GUESS


def test_a_token_that_the_model_lacks_ends_a_guess() -> None:
    assert ForcedSource(VOCAB).guess(started(ScriptedMatcher([5, VOCAB, 7])), 4).token_ids == (5,)


def test_the_grammar_is_asked_once_for_text_that_comes_as_it_must() -> None:
    matcher = ScriptedMatcher(range(10, 30))
    source, request = ForcedSource(VOCAB), started(matcher)
    guesses = []
    for _ in range(5):
        guesses.append(source.guess(request, 3).token_ids)
        for token in (*guesses[-1], guesses[-1][-1] + 1):
            request.append(token)
    assert guesses == [(10, 11, 12), (14, 15, 16), (18, 19, 20), (22, 23, 24), (26, 27, 28)]
    assert matcher.num_asked == 1
    source.guess(request, 3)
    assert matcher.num_asked == 2


@pytest.mark.parametrize("others", [[99], [10, 99], [10, 11, 99]])
def test_it_is_asked_again_when_others_come(others: list[int]) -> None:
    matcher = ScriptedMatcher(range(10, 30))
    source, request = ForcedSource(VOCAB), started(matcher)
    source.guess(request, 3)
    for token in others:
        request.append(token)
    matcher.script = [77]
    assert source.guess(request, 3).token_ids == (77,)


def test_a_room_that_begins_anew_is_asked_anew() -> None:
    source = ForcedSource(VOCAB)
    source.guess(started(ScriptedMatcher([5, 6, 7])), 3)
    assert source.guess(started(ScriptedMatcher([8])), 3).token_ids == (8,)
    assert source.guess(started(None), 3) == NO_GUESS


def test_nothing_is_kept_of_a_request_that_left() -> None:
    source, request = ForcedSource(VOCAB), started(ScriptedMatcher([5, 6, 7]))
    source.guess(request, 3)
    assert source.nbytes > 0
    source.end(request)
    source.end(request)
    assert source.nbytes == 0
