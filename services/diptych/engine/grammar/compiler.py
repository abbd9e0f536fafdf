"""Compiles grammars to token masks with llguidance. Nothing else knows that library.

Rule: no special token is ever allowed inside an output; the end-of-sequence tokens are, where the grammar is complete.
Matchers of one compiled grammar share what they learn about the vocabulary, so the second request runs faster than the
first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from diptych.common.errors import ConfigError, InvalidRequest
from diptych.engine.batch import I32
from diptych.engine.grammar import json_schema
from diptych.engine.grammar.grammar import Grammar, GrammarKind
from diptych.engine.loader.tokenizer import Tokenizer

# Between two JSON tokens. Without a bound a model may write blanks until it has no tokens left.
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,32}"
# Of a compiled grammar and all its matchers; 85 MiB. Usual grammars need hundreds, hostile ones a dozen a token.
MAX_LEXER_STATES: Final = 250_000
MAX_SHARED_TOKENS: Final = 4096
# Text that can't be otherwise is not forced into the tokens that the tokenizer would choose: special ones may be among
# them where a grammar spells one out, and a replay might meet other tokens.
HEADER: Final = '%llguidance {"no_forcing": true}\n'
GBNF_HEADER: Final = "%llguidance {}\n"
PROBE: Final = ' {"a": [1, -2.5e3], "é ü": "日本\\n\t"}'


def check(grammar: Grammar) -> None:
    """Raise `InvalidRequest` with the compiler's words if no vocabulary could make `grammar` work. Cheap."""
    problem = llguidance.LLMatcher.validate_grammar(_source(grammar), limits=_limits())
    if problem:
        raise _refusal(grammar, problem)


class Compiler:
    """Compiles for one model. One thread at a time may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """Raise `ConfigError` for a tokenizer whose tokens llguidance can't map to bytes."""
        num_tokens = max(vocab_size, tokenizer.vocab_size)  # some tokenizers have tokens that the model lacks
        eos = sorted(eos_ids) or None
        try:
            self._vocabulary = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=num_tokens, eos_token=eos)
        except ValueError as error:
            raise ConfigError(f"structured output does not work with this tokenizer: {error}") from None
        _check_bytes(tokenizer, self._vocabulary)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raise `InvalidRequest` with the compiler's words if `grammar` can't be compiled."""
        matcher = llguidance.LLMatcher(self._vocabulary, _source(grammar), log_level=0, limits=_limits())
        compiled = CompiledGrammar(matcher, self._vocabulary.vocab_size)
        error = compiled.warm_up()
        if error is not None:
            raise _refusal(grammar, error)
        return compiled


class CompiledGrammar:
    """A grammar for one vocabulary: makes matchers, each for one request."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._start = matcher
        self._vocab_size = vocab_size
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
        return GrammarMatcher(self._start.deep_copy(), self._vocab_size, self._count)

    def _count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens


class GrammarMatcher:
    """Implements `Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, count: Callable[[int], None]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._count = count

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        return _first_words(self._matcher.get_error()) if self._matcher.is_error() else None

    def accept(self, token_ids: Sequence[int]) -> None:
        if not self._matcher.is_stopped():  # else it is an end-of-sequence token, after the end
            self._matcher.consume_tokens(list(token_ids))
            self._count(len(token_ids))

    def new_mask(self, num_rows: int) -> I32:
        return np.full((num_rows, -(-self._vocab_size // 32)), -1, dtype=np.int32)

    def fill_mask(self, mask: I32, row: int) -> None:
        assert mask.dtype == np.int32
        assert mask.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data + row * mask.strides[0], mask.strides[0])


def _source(grammar: Grammar) -> str:
    """Return what llguidance reads: its own dialect of Lark's grammars."""
    try:
        return HEADER + _rules(grammar)
    except Exception as error:  # the converter of GBNF raises nothing more special
        raise _refusal(grammar, str(error)) from None


def _rules(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = json_schema.read(grammar.text)
            options = {"whitespace_pattern": WHITESPACE, **schema.get("x-guidance", {})}
            return f"start: %json {json.dumps({**schema, 'x-guidance': options})}"
        case GrammarKind.REGEX:
            return f"start: /{llguidance.regex_to_lark(grammar.text, '')}/"
        case GrammarKind.EBNF:
            return gbnf_to_lark(grammar.text).removeprefix(GBNF_HEADER)


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def _refusal(grammar: Grammar, words: str) -> InvalidRequest:
    return InvalidRequest(f"{grammar.kind.value} can't be compiled: {_first_words(words)}", param=grammar.kind.value)


def _first_words(words: str) -> str:
    """Cut off the dumps that llguidance appends, and put its tersest word at more length."""
    for mark in ("<non-verbose/>", "<state>"):
        words = words.partition(mark)[0]
    return words.strip().replace("NoExtensionBias", "nothing can match it")


def _check_bytes(tokenizer: Tokenizer, vocabulary: llguidance.LLTokenizer) -> None:
    """A vocabulary read wrongly would give outputs that don't match, so compare it with the tokenizer."""
    ids = tokenizer.encode(PROBE)
    expected, found = tokenizer.decode(ids, skip_special_tokens=False), vocabulary.decode_str(ids)
    if found.lstrip(" ") != expected.lstrip(" "):  # some tokenizers add or drop a blank at the very start
        raise ConfigError(f"structured output does not work with this tokenizer: {expected!r} is read as {found!r}")
