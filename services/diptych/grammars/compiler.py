"""Compiles grammars for a vocabulary, with llguidance. Nothing but this, `source` and `matcher` knows that library.

Rule: no special token is ever allowed inside an output; the end-of-sequence tokens are, where the grammar is complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import llguidance

from diptych.common.errors import ConfigError
from diptych.generation.grammar import Grammar, num_words
from diptych.grammars.matcher import CompiledGrammar
from diptych.grammars.source import limits, refusal, source_of
from diptych.tokens.tokenizer import Tokenizer

PROBE: Final = ' {"a": [1, -2.5e3], "é ü": "日本\\n\t"}'


class Compiler:
    """Compiles for one model. One thread at a time may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """Raise `ConfigError` for a tokenizer whose tokens llguidance can't map to bytes."""
        self._vocab_size = vocab_size
        num_tokens = max(vocab_size, tokenizer.vocab_size)  # some tokenizers have tokens that the model lacks
        eos = sorted(eos_ids) or None
        try:
            self._vocabulary = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=num_tokens, eos_token=eos)
        except ValueError as error:
            raise ConfigError(f"structured output does not work with this tokenizer: {error}") from None
        _check_bytes(tokenizer, self._vocabulary)

    def compile(self, grammar: Grammar, source: str = "") -> CompiledGrammar:
        """Compile `source`, which a check made of `grammar`. Raise `InvalidRequest` with the compiler's words.

        A grammar that was not checked may take gigabytes, or end this process.
        """
        source = source or source_of(grammar)
        matcher = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits())
        compiled = CompiledGrammar(matcher, num_words(self._vocab_size), self._vocabulary)
        error = compiled.warm_up()
        if error is not None:
            raise refusal(grammar, error)
        return compiled


def _check_bytes(tokenizer: Tokenizer, vocabulary: llguidance.LLTokenizer) -> None:
    """A vocabulary read wrongly would give outputs that don't match, so compare it with the tokenizer."""
    ids = tokenizer.encode(PROBE)
    expected, found = tokenizer.decode(ids, skip_special_tokens=False), vocabulary.decode_str(ids)
    if found.lstrip(" ") != expected.lstrip(" "):  # some tokenizers add or drop a blank at the very start
        raise ConfigError(f"structured output does not work with this tokenizer: {expected!r} is read as {found!r}")
