"""A matcher's copy looks behind guesses: what it can't say is left to the matcher, and it may not take long."""

from __future__ import annotations

import llguidance
import numpy as np
import pytest
from bombs import ambiguous

from diptych.generation.grammar import Grammar, GrammarKind, num_words
from diptych.grammars.matcher import AHEAD_S, AHEAD_S_PER_TOKEN, CompiledGrammar, GrammarMatcher, Lend
from diptych.grammars.source import source_of
from diptych.tokens.tokenizer import Tokenizer

VOCAB = 300
EOS = 0
NUM_GUESSED = 15


class Clock:
    """Each reading is later by `step_s`."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += self.step_s
        return self._now_s


def compiled(tokenizer: Tokenizer, grammar: Grammar, clock: Clock, max_items: int = 1000) -> CompiledGrammar:
    vocabulary = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=VOCAB, eos_token=[EOS])
    limits = llguidance.LLParserLimits(step_max_items=max_items, verbose_errors=False)
    start = llguidance.LLMatcher(vocabulary, source_of(grammar), log_level=0, limits=limits)
    return CompiledGrammar(start, num_words(VOCAB), vocabulary, clock)


def many(tokenizer: Tokenizer, step_s: float, lend: Lend | None = None) -> tuple[GrammarMatcher, Clock, list[int]]:
    """Return a matcher of any number of one token, and a guess that it goes on."""
    clock = Clock(step_s)
    matcher = compiled(tokenizer, Grammar(GrammarKind.REGEX, "x*"), clock).matcher(lend)
    return matcher, clock, tokenizer.encode("x") * NUM_GUESSED


def num_rows(matcher: GrammarMatcher, guess: list[int]) -> int:
    """Return how many rows behind the first one allow anything: the first ones, or the test fails."""
    mask = matcher.new_mask(1 + len(guess))
    matcher.fill_masks(mask, 0, guess)
    allows = [bool(words.any()) for words in mask]
    count = sum(allows)
    assert allows == [True] * count + [False] * (len(allows) - count)
    return count - 1


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
def test_rows_are_those_of_single_tokens_up_to_one_that_has_no_mask(byte_tokenizer: Tokenizer, num_before: int) -> None:
    """Where a grammar's limit is met, the mask is an end of the sequence alone: as if the output were complete."""
    (token,) = byte_tokenizer.encode("a")
    grammar = compiled(byte_tokenizer, ambiguous(3), Clock(0.0))
    matcher, single = grammar.matcher(), grammar.matcher()
    for each in (matcher, single):
        each.accept([token] * num_before)
    mask, alone = matcher.new_mask(1 + NUM_GUESSED), single.new_mask(1)
    matcher.fill_masks(mask, 0, [token] * NUM_GUESSED)
    for row in range(1 + NUM_GUESSED):
        single.fill_mask(alone, 0)
        if single.error is not None:
            break
        assert np.array_equal(mask[row], alone[0])
        single.accept([token])
    assert row in range(1, NUM_GUESSED), "the limit is met among the guesses"
    assert not mask[row:].any()
    assert matcher.error is None


def test_behind_the_end_and_behind_what_can_not_come_no_token_is_sampled(byte_tokenizer: Tokenizer) -> None:
    grammar = compiled(byte_tokenizer, Grammar(GrammarKind.REGEX, "xy|xz"), Clock(0.0))
    x, y = (byte_tokenizer.encode(text)[0] for text in "xy")
    assert num_rows(grammar.matcher(), [x, x, y]) == 1
    assert num_rows(grammar.matcher(), [x, y, y]) == 1


def test_guesses_of_a_slow_grammar_are_looked_at_no_longer_than_is_free(byte_tokenizer: Tokenizer) -> None:
    """One token more is the most that a batch waits for."""
    lent_s: list[float] = []

    def lend(seconds: float) -> bool:
        lent_s.append(seconds)
        return False

    matcher, clock, guess = many(byte_tokenizer, AHEAD_S * 0.4, lend)
    began_s = clock()
    assert matcher.count_allowed(guess) == 0
    took_s = clock() - began_s
    assert took_s < 2.5 * AHEAD_S, "five readings of the clock, not one a token"
    assert sum(lent_s) == pytest.approx(0.6 * AHEAD_S), "three tokens and the end, less what is free"
    assert matcher.error is None, "no output fails by a guess"


def test_rows_that_take_too_long_are_left_to_the_next_step(byte_tokenizer: Tokenizer) -> None:
    matcher, clock, guess = many(byte_tokenizer, AHEAD_S / 10)
    assert num_rows(matcher, guess) in range(2, 6)
    assert num_rows(matcher, guess) == 0, "nothing is left"
    clock.step_s = 0.0
    assert (matcher.count_allowed(guess), list(matcher.forced())) == (0, [])


def test_an_output_earns_time_to_look_ahead_by_its_tokens(byte_tokenizer: Tokenizer) -> None:
    matcher, clock, guess = many(byte_tokenizer, AHEAD_S * 0.4)
    assert matcher.count_allowed(guess) == 0
    clock.step_s = 0.0
    num_tokens = 0
    while not matcher.count_allowed(guess):
        matcher.accept(guess[:1])
        num_tokens += 1
    assert num_tokens in range(1, 2 + round(AHEAD_S / AHEAD_S_PER_TOKEN))
    matcher.accept(guess * 100)
    clock.step_s = AHEAD_S * 1.1
    assert matcher.count_allowed(guess) == 0, "it does not save up more than it had at first"
