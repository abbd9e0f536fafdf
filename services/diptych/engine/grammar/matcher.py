"""Follows outputs in compiled grammars, with llguidance.

Matchers of one compiled grammar share what they learn about the vocabulary, so the second request runs faster than the
first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import llguidance
import numpy as np

from diptych.engine.batch import I32

MAX_SHARED_TOKENS: Final = 4096  # of all matchers of a compiled grammar
_DUMP: Final = re.compile(r"(<non-verbose/>|<state>|\n +\d+ \| ).*", re.DOTALL)
_PLACE: Final = re.compile(r"^at \d+\(\d+\): ")


class CompiledGrammar:
    """A grammar for one vocabulary: makes matchers, each for one request."""

    def __init__(self, matcher: llguidance.LLMatcher, num_mask_words: int, num_own_words: int) -> None:
        self._start = matcher
        self._num_mask_words = num_mask_words  # of a row, as the model's vocabulary needs
        self._num_own_words = num_own_words  # as the tokenizer's needs
        self._num_tokens = 0  # that its matchers have taken

    @property
    def is_worn(self) -> bool:
        """It should be compiled anew: what its matchers share grows with their tokens, and is limited."""
        return self._num_tokens > MAX_SHARED_TOKENS

    def warm_up(self) -> str | None:
        """Do the work that otherwise falls to the first token: most of what there is. Return what is wrong, if any."""
        matcher = self.matcher()
        matcher.fill_mask(matcher.new_mask(1), 0)
        return matcher.error

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._start.deep_copy(), self._num_mask_words, self._num_own_words, self._count)

    def _count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens


class GrammarMatcher:
    """Implements `Matcher`."""

    def __init__(
        self, matcher: llguidance.LLMatcher, num_mask_words: int, num_own_words: int, count: Callable[[int], None]
    ) -> None:
        self._matcher = matcher
        self._num_mask_words = num_mask_words
        self._num_own_words = num_own_words
        self._count = count

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        return first_words(self._matcher.get_error()) if self._matcher.is_error() else None

    def accept(self, token_ids: Sequence[int]) -> None:
        if not self._matcher.is_stopped():  # else it is an end-of-sequence token, after the end
            self._matcher.consume_tokens(list(token_ids))
            self._count(len(token_ids))

    def new_mask(self, num_rows: int) -> I32:
        return np.full((num_rows, self._num_mask_words), -1, dtype=np.int32)

    def fill_mask(self, mask: I32, row: int) -> None:
        assert mask.shape[1] == self._num_mask_words
        if self._num_own_words == self._num_mask_words:
            self._fill(mask[row])
        else:
            words = np.empty(self._num_own_words, dtype=np.int32)
            self._fill(words)
            mask[row] = words[: self._num_mask_words]

    def _fill(self, words: I32) -> None:
        assert words.dtype == np.int32
        assert words.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


def num_words(vocab_size: int) -> int:
    """Return how many words of 32 bits hold one bit a token."""
    return -(-vocab_size // 32)


def first_words(words: str) -> str:
    """Cut off llguidance's dumps and places in what it made of the grammar; put its tersest word at more length."""
    words = _PLACE.sub("", _DUMP.sub("", words))
    return words.strip().replace("NoExtensionBias", "nothing can match it")
