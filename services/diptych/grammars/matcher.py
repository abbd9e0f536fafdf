"""Follows outputs in compiled grammars, with llguidance.

Matchers of one compiled grammar share what they learn about the vocabulary, so the second request runs faster than the
first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from itertools import takewhile
from typing import Final, TypeAlias

import llguidance
import numpy as np

from diptych.common.arrays import I32
from diptych.generation.grammar import num_words
from diptych.grammars.source import first_words

MAX_SHARED_TOKENS: Final = 4096  # of all matchers of a compiled grammar
# A whole batch waits for each mask, so an output may take this much of the CPU, and this much more for each token.
# Usual masks take 0.02 to 0.1 ms; where words can be read in many ways, one may take a twelfth of a second.
FREE_S: Final = 0.25
FREE_S_PER_TOKEN: Final = 0.002
CHEAP_S: Final = 0.02  # beside its tokens'; what an output takes beyond it is its tenant's debt. Usual ones take 0.004
Lend: TypeAlias = Callable[[float], bool]  # so many seconds more to the tenant; False: too much, the output must end

# To look ahead for guesses an output may take this much, and this much more for each token, up to as much again; with
# nothing left it gets no guesses. What it takes beyond is its tenant's debt, but ends no output.
AHEAD_S: Final = 0.02
AHEAD_S_PER_TOKEN: Final = 0.001

MAX_FORCED_BYTES: Final = 256  # that are looked at, of text that can't be otherwise

TOO_SLOW: Final = "its tokens take too long to find: avoid rules that match the same text in many ways"


class CompiledGrammar:
    """A grammar for one vocabulary: makes matchers, each for one request."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        num_mask_words: int,
        vocabulary: llguidance.LLTokenizer,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._start = matcher
        self.num_mask_words = num_mask_words  # of a row, as the model's vocabulary needs
        self.num_own_words = num_words(vocabulary.vocab_size)  # as the tokenizer's needs
        self._vocabulary = vocabulary
        self.clock = clock  # of this thread's CPU time
        self.num_tokens = 0  # that its matchers have taken

    @property
    def is_worn(self) -> bool:
        """It should be compiled anew: what its matchers share grows with their tokens, and is limited."""
        return self.num_tokens > MAX_SHARED_TOKENS

    def warm_up(self) -> str | None:
        """Do the work that otherwise falls to the first token: most of what there is. Return what is wrong, if any."""
        matcher = self.matcher()
        matcher.fill_mask(matcher.new_mask(1), 0)
        return matcher.error

    def spelled(self, text: bytes) -> Sequence[int]:
        """Return tokens of the beginning of a text: those that are the same whatever comes behind, and none special."""
        tokens, _ = self._vocabulary.tokenize_partial(text)
        return list(takewhile(lambda token: not self._vocabulary.is_special_token(token), tokens))

    def matcher(self, lend: Lend | None = None) -> GrammarMatcher:
        """Return one for an output; without `lend` nobody owes what it takes."""
        return GrammarMatcher(self._start.deep_copy(), self, lend)


class GrammarMatcher:
    """Implements `Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, grammar: CompiledGrammar, lend: Lend | None) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._num_mask_words, self._num_own_words = grammar.num_mask_words, grammar.num_own_words
        self._clock = grammar.clock
        self._lend = lend
        self._left_s = FREE_S
        self._is_broke = False  # its tenant
        self._ahead_s = AHEAD_S  # is left
        self._covered_s = FREE_S - CHEAP_S  # as little may be left before its tenant owes more

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        if self._matcher.is_error():
            return first_words(self._matcher.get_error())
        return TOO_SLOW if self._is_broke or self._left_s < 0 else None

    def accept(self, token_ids: Sequence[int]) -> None:
        if not self._matcher.is_stopped():  # else it is an end-of-sequence token, after the end
            consume, tokens = self._matcher.consume_tokens, list(token_ids)
            begun_s = self._clock()  # from here on nothing is made that may set off a search for garbage
            consume(tokens)
            self._spend(self._clock() - begun_s - FREE_S_PER_TOKEN * len(tokens))
            self._grammar.num_tokens += len(tokens)
            self._ahead_s = min(AHEAD_S, self._ahead_s + AHEAD_S_PER_TOKEN * len(tokens))

    def new_mask(self, num_rows: int) -> I32:
        return np.full((num_rows, self._num_mask_words), -1, dtype=np.int32)

    def fill_mask(self, mask: I32, row: int) -> None:
        self._spend(self._fill(self._matcher, mask, row))

    def fill_masks(self, mask: I32, row: int, guess: Sequence[int]) -> None:
        """A copy looks ahead. What it can't say, for an error of its own or for the time, is left to the next step."""
        self.fill_mask(mask, row)
        if guess:
            mask[row + 1 : row + 1 + len(guess)] = 0
            self._look_ahead(guess, lambda ahead, count: self._fill_behind(ahead, mask, row + count))

    def count_allowed(self, guess: Sequence[int]) -> int:
        num_allowed = self._look_ahead(guess, lambda ahead, count: True)
        return num_allowed if self._ahead_s > 0 else 0

    def forced(self) -> Sequence[int]:
        """See `Matcher.forced`. A copy is asked: the matcher itself would remember what it forced."""
        if self._ahead_s <= 0 or self._matcher.is_stopped():
            return ()
        begun_s = self._clock()
        text = _whole_characters(self._matcher.deep_copy().compute_ff_bytes())
        tokens = self._grammar.spelled(text) if text else ()
        self._spend_ahead(self._clock() - begun_s)
        return tokens

    def _look_ahead(self, guess: Sequence[int], look: Callable[[llguidance.LLMatcher, int], bool]) -> int:
        """Let a copy take a guess token by token, and look behind each, while time is left; return how many it took."""
        if self._ahead_s <= 0 or self._matcher.is_stopped():
            return 0
        steps, count = [[token_id] for token_id in guess], 0
        begun_s = self._clock()  # likewise
        ahead = self._matcher.deep_copy()
        while count < len(steps) and ahead.try_consume_tokens(steps[count]) and not ahead.is_error():
            count += 1
            if not look(ahead, count) or self._clock() - begun_s > self._ahead_s:
                break
        self._spend_ahead(self._clock() - begun_s)
        return count

    def _fill_behind(self, ahead: llguidance.LLMatcher, mask: I32, row: int) -> bool:
        """Return whether more may follow. An error would allow an end of the sequence, and nothing else."""
        if ahead.is_stopped():
            return False
        self._fill(ahead, mask, row)
        if ahead.is_error():
            mask[row] = 0
        return not ahead.is_error()

    def _fill(self, matcher: llguidance.LLMatcher, mask: I32, row: int) -> float:
        """Return how many seconds it took."""
        assert mask.shape[1] == self._num_mask_words
        assert mask.dtype == np.int32
        fits = self._num_own_words == self._num_mask_words
        words = mask[row] if fits else np.empty(self._num_own_words, dtype=np.int32)
        address = addressof(c_char.from_buffer(words.data))  # must be contiguous; its `ctypes.data` takes longer
        compute, num_bytes = matcher.unsafe_compute_mask_ptr, words.nbytes
        begun_s = self._clock()  # likewise
        compute(address, num_bytes)
        took_s = self._clock() - begun_s
        if not fits:
            mask[row] = words[: self._num_mask_words]
        return took_s

    def _spend(self, seconds: float) -> None:
        self._left_s -= seconds
        if self._left_s < self._covered_s and self._lend is not None:
            owed_s, self._covered_s = self._covered_s - self._left_s, self._left_s
            self._is_broke |= not self._lend(owed_s)

    def _spend_ahead(self, seconds: float) -> None:
        owed_s = seconds - max(self._ahead_s, 0.0)
        self._ahead_s -= seconds
        if owed_s > 0 and self._lend is not None:
            self._lend(owed_s)


def _whole_characters(text: bytes) -> bytes:
    """Cut UTF-8 to what is looked at."""
    end = MAX_FORCED_BYTES
    while end < len(text) and text[end] & 0xC0 == 0x80:
        end -= 1
    return text[:end]
