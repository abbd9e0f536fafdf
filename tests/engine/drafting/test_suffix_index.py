"""The index in C beside a model in Python that looks at the whole text each time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.arrays import I64
from diptych.engine.drafting.source import NO_GUESS, Guess
from diptych.engine.drafting.suffix_index import (
    MAX_GUESS,
    MIN_CAPACITY,
    NO_TOKEN,
    SuffixIndex,
    SuffixReader,
    nbytes_for,
)

ORDERS = (3, 1)
MAX_PLACES = 16
MAX_MATCH = 64
MIN_CHANCE = 0.02


class NaiveReader:
    """What `SuffixReader` should say: by comparing every place with the end of the text."""

    def __init__(self, text: Sequence[int], *, is_own: bool) -> None:
        self._text = text
        self._is_own = is_own
        self._followed = self._seen = 0

    def guess(self, taken: Sequence[int], capacity: int, text_len: int, at_most: int) -> Guess:
        text = self._text[:text_len]
        self._followed, self._seen = self._followed + text_len - self._seen, text_len
        first = max(0, len(taken) - capacity)
        matches = {at: _match(taken[first:at], text) for at in range(first, len(taken)) if taken[at] >= 0}
        places: dict[int, int] = {}
        for order in ORDERS:
            places = places or dict(reversed([(at, match) for at, match in matches.items() if match >= order]))
        places = dict(list(places.items())[:MAX_PLACES])
        if matches.get(self._followed):
            places[self._followed] = matches[self._followed]
        return self._most_likely(taken, places, text, at_most)

    def _most_likely(self, taken: Sequence[int], places: dict[int, int], text: Sequence[int], at_most: int) -> Guess:
        guess: list[int] = []
        chances: list[float] = []
        chance = 1.0
        while places and len(guess) < at_most:
            known = [*text, *guess] if self._is_own else taken
            weights: dict[int, float] = {}
            following = {at: known[at + len(guess)] for at in places if at + len(guess) < len(known)}
            for at, token in following.items():
                if token >= 0:
                    weights[token] = weights.get(token, 0) + 2.0 ** places[at]
            if not weights:
                break
            token = max(weights, key=lambda each: weights[each])
            share = weights[token] / sum(2.0**match for match in places.values())
            places = {at: match for at, match in places.items() if following.get(at) == token}
            match = max(places.values()) + len(guess)
            chance *= share * share * match / (match + 1)
            if chance < MIN_CHANCE:
                break
            guess.append(token)
            chances.append(chance)
        if guess:
            self._followed = max(places, key=lambda at: places[at])
        return Guess(tuple(guess), tuple(chances))


def _match(before: Sequence[int], text: Sequence[int]) -> int:
    match = 0
    while match < min(len(before), len(text), MAX_MATCH) and 0 <= before[-1 - match] == text[-1 - match]:
        match += 1
    return match


def assert_same(guess: Guess, expected: Guess) -> None:
    assert guess.token_ids == expected.token_ids
    assert guess.chances == pytest.approx(expected.chances)


def as_text(tokens: Sequence[int]) -> I64:
    return np.array(tokens, np.int64)


texts = st.integers(1, 4).flatmap(lambda most: st.lists(st.integers(0, most), min_size=1, max_size=30))


@settings(deadline=None)
@given(tokens=texts, steps=st.lists(st.integers(1, 5), max_size=30), at_most=st.integers(1, 20))
def test_a_text_goes_on_as_it_did_before(tokens: list[int], steps: list[int], at_most: int) -> None:
    text = as_text(tokens)
    index, reader, naive = SuffixIndex(len(text)), SuffixReader(text, is_own=True), NaiveReader(tokens, is_own=True)
    for step in [*steps, len(text)]:
        end = min(len(text), index.size + step)
        index.append(text[index.size : end])
        assert_same(reader.guess(index, end, at_most), naive.guess(tokens[:end], index.capacity, end, at_most))


@settings(deadline=None)
@given(answers=st.lists(texts.map(lambda text: text[:10]), max_size=3), tokens=texts, at_most=st.integers(1, 20))
def test_a_text_goes_on_as_others_did(answers: list[list[int]], tokens: list[int], at_most: int) -> None:
    taken = [token for answer in answers for token in (-1, *answer)]
    index = SuffixIndex(1)
    index.append(as_text(taken))
    reader, naive = SuffixReader(as_text(tokens), is_own=False), NaiveReader(tokens, is_own=False)
    for end in range(1, len(tokens) + 1):
        assert_same(reader.guess(index, end, at_most), naive.guess(taken, index.capacity, end, at_most))


@pytest.mark.parametrize("seed", range(20))
def test_the_oldest_tokens_of_a_full_index_count_no_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 40, 300)
    text[150:200] = text[100:150]
    index, reader, naive = SuffixIndex(1), SuffixReader(text, is_own=True), NaiveReader(text.tolist(), is_own=True)
    num_guessed = 0
    while index.size < len(text):
        end = min(len(text), index.size + int(rng.integers(1, 6)))
        index.append(text[index.size : end])
        guess = reader.guess(index, end, 8)
        num_guessed += len(guess.token_ids)
        assert_same(guess, naive.guess(text[:end].tolist(), MIN_CAPACITY, end, 8))
    assert index.held.tolist() == text[-MIN_CAPACITY:].tolist()
    assert num_guessed > 100


def test_what_is_no_token_is_neither_guessed_nor_compared() -> None:
    text = as_text([1, 2, -5, -6, 3, 1, 2])
    index = SuffixIndex(len(text))
    index.append(text)
    reader = SuffixReader(text, is_own=True)
    assert reader.guess(index, len(text), 4) == NO_GUESS
    text[-2:] = -5, -6
    assert reader.guess(index, len(text), 4) == NO_GUESS


def test_a_period_is_guessed_beyond_the_end_of_the_text() -> None:
    text = as_text([7, 1, 2, 3, 1, 2, 3])
    index = SuffixIndex(len(text))
    index.append(text)
    guess = SuffixReader(text, is_own=True).guess(index, len(text), 8)
    assert guess.token_ids == (1, 2, 3, 1, 2, 3, 1, 2)
    assert guess.chances == pytest.approx([3 / (3 + k) for k in range(1, 9)])


def test_a_longer_match_is_likelier_and_contexts_that_disagree_less_likely() -> None:
    def first_chance(tokens: list[int]) -> float:
        text = as_text(tokens)
        index = SuffixIndex(len(text))
        index.append(text)
        return SuffixReader(text, is_own=True).guess(index, len(text), 1).chances[0]

    assert (
        first_chance([5, 1, 9, 6, 1]) < first_chance([4, 5, 1, 9, 4, 5, 1]) < first_chance([3, 4, 5, 1, 9, 3, 4, 5, 1])
    )
    assert first_chance([4, 1, 9, 5, 1, 8, 6, 1]) < first_chance([4, 1, 9, 5, 1, 9, 6, 1])


def test_a_place_is_followed_however_many_newer_ones_look_like_it() -> None:
    """The oldest of 40 lines that begin alike is quoted: it stays the one when newer ones have been forgotten."""
    head, tails = list(range(100, 112)), [[1000 + line, 2000 + line, 3000 + line] for line in range(40)]
    text = [token for tail in tails for token in (*head, *tail)]
    quoted = as_text([*text, 55, 56, *tails[0], *head, *tails[1]])
    index, reader = SuffixIndex(len(quoted)), SuffixReader(quoted, is_own=True)
    begin = len(text) + 2
    index.append(quoted[:begin])
    for end in range(begin + 1, len(quoted)):
        index.append(quoted[index.size : end])
        guess = reader.guess(index, end, 1)
        if end > begin + 3:
            assert guess.token_ids == (quoted[end],)


def test_no_more_is_guessed_than_may_be() -> None:
    text = as_text([1] * 200)
    index = SuffixIndex(len(text))
    index.append(text)
    reader = SuffixReader(text, is_own=True)
    assert len(reader.guess(index, len(text), 1000).token_ids) == MAX_GUESS
    assert reader.guess(index, len(text), 0) == NO_GUESS


@pytest.mark.parametrize("num_tokens", [64, 65, 1000, 4096, 4097, 100_000])
def test_a_token_takes_no_more_than_64_bytes(num_tokens: int) -> None:
    index = SuffixIndex(num_tokens)
    assert index.nbytes == nbytes_for(num_tokens) <= 64 * num_tokens
    assert index.nbytes <= 32 * num_tokens + 1024
    assert index.capacity >= num_tokens


def test_texts_are_told_apart_by_what_is_no_token() -> None:
    index = SuffixIndex(8)
    for answer in ([1, 2], [3, 4]):
        index.append(NO_TOKEN)
        index.append(as_text(answer))
    assert SuffixReader(as_text([2]), is_own=False).guess(index, 1, 4) == NO_GUESS
    assert SuffixReader(as_text([3]), is_own=False).guess(index, 1, 4).token_ids == (4,)
