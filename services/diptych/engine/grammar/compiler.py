"""Compiles grammars for a vocabulary, with llguidance. Nothing but this and `matcher` knows that library.

Rule: no special token is ever allowed inside an output; the end-of-sequence tokens are, where the grammar is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from diptych.common.errors import ConfigError, InvalidRequest
from diptych.engine.grammar import json_schema
from diptych.engine.grammar.grammar import Grammar, GrammarKind, Preamble
from diptych.engine.grammar.matcher import CompiledGrammar, first_words, num_words
from diptych.engine.loader.tokenizer import Tokenizer

# Between two JSON tokens. Without a bound a model may write blanks until it has no tokens left.
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,32}"
# Of a compiled grammar and all its matchers; 85 MiB. Usual grammars need hundreds, hostile ones a dozen a token.
MAX_LEXER_STATES: Final = 250_000
# Text that can't be otherwise is not forced into the tokens that the tokenizer would choose: special ones may be among
# them where a grammar spells one out, and a replay might meet other tokens.
HEADER: Final = '%llguidance {"no_forcing": true}\n'
GBNF_HEADER: Final = "%llguidance {}\n"
BLANKS: Final = r"/[ \n\r\t]{0,8}/"  # between what a model thinks and what it answers
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
        self._vocab_size = vocab_size
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
        compiled = CompiledGrammar(matcher, num_words(self._vocab_size), num_words(self._vocabulary.vocab_size))
        error = compiled.warm_up()
        if error is not None:
            raise _refusal(grammar, error)
        return compiled


def _source(grammar: Grammar) -> str:
    """Return what llguidance reads: its own dialect of Lark's grammars, or several of them as JSON."""
    try:
        rules = HEADER + _rules(grammar)
        return rules if grammar.preamble is None else _behind(grammar.preamble, rules)
    except Exception as error:  # the converter of GBNF raises nothing more special
        raise _refusal(grammar, str(error)) from None


def _behind(preamble: Preamble, rules: str) -> str:
    """Return the grammar of texts that begin with the preamble. `rules` keep their names to themselves."""
    front = "thought" if not preamble.opening else f"({json.dumps(preamble.opening)} thought)?"
    lines = (
        f"start: {front} @answer",
        f"thought: free {BLANKS}",
        f"free[suffix={json.dumps(preamble.closing)}]: /(?s:.*)/",
    )
    parts = [("output", HEADER + "\n".join(lines)), ("answer", rules)]
    return json.dumps({"grammars": [{"name": name, "lark_grammar": text} for name, text in parts]})


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
    return InvalidRequest(f"{grammar.kind.value} can't be compiled: {first_words(words)}", param=grammar.kind.value)


def _check_bytes(tokenizer: Tokenizer, vocabulary: llguidance.LLTokenizer) -> None:
    """A vocabulary read wrongly would give outputs that don't match, so compare it with the tokenizer."""
    ids = tokenizer.encode(PROBE)
    expected, found = tokenizer.decode(ids, skip_special_tokens=False), vocabulary.decode_str(ids)
    if found.lstrip(" ") != expected.lstrip(" "):  # some tokenizers add or drop a blank at the very start
        raise ConfigError(f"structured output does not work with this tokenizer: {expected!r} is read as {found!r}")
