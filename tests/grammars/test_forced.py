"""Text that can't be otherwise, as tokens."""

from __future__ import annotations

import llguidance
import numpy as np
import pytest

from diptych.checkpoints.source import ModelSource
from diptych.common.arrays import I32
from diptych.generation.grammar import Grammar, GrammarKind, num_words
from diptych.grammars.compiler import Compiler
from diptych.grammars.matcher import MAX_FORCED_BYTES, CompiledGrammar, GrammarMatcher
from diptych.grammars.source import source_of
from diptych.tokens.tokenizer import Tokenizer

VOCAB = 300
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "is_active": {"type": "boolean"}},
    "required": ["name", "is_active"],
    "additionalProperties": False,
}


def matcher_of(tokenizer: Tokenizer, grammar: Grammar, text: str = "", vocab_size: int = VOCAB) -> GrammarMatcher:
    matcher = Compiler(tokenizer, vocab_size, tokenizer.eos_ids).compile(grammar).matcher()
    if text:
        matcher.accept(tokenizer.encode(text))
    assert matcher.error is None
    return matcher


def mask_of(matcher: GrammarMatcher) -> I32:
    mask = matcher.new_mask(1)
    matcher.fill_mask(mask, 0)
    return mask


def forced(tokenizer: Tokenizer, grammar: Grammar, text: str = "") -> str:
    matcher = matcher_of(tokenizer, grammar, text)
    before = mask_of(matcher)
    tokens = list(matcher.forced())
    assert np.array_equal(mask_of(matcher), before), "it changed what may come"
    assert matcher.count_allowed(tokens) == len(tokens)
    matcher.accept(tokens)
    assert matcher.error is None
    return tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("grammar", "text", "expected"),
    [
        (Grammar.from_choices(["hello", "help"]), "", "hel"),
        (Grammar.from_choices(["hello", "help"]), "hell", "o"),
        (Grammar.from_choices(["hello", "world"]), "", ""),
        (Grammar.from_choices(["hello"]), "hello", ""),
        (
            Grammar(GrammarKind.REGEX, "Answer: (yes|no)"),
            "",
            "Answer:",
        ),  # a longer token may begin with the blank
        (Grammar.from_schema(SCHEMA), '{"', "name"),  # behind it `":` may be one token
        (Grammar.from_schema(SCHEMA), '{"name":"a","', "is_active"),
        (Grammar.from_schema(SCHEMA), '{"name":', ""),
    ],
)
def test_what_can_not_be_otherwise_is_forced(
    byte_tokenizer: Tokenizer, grammar: Grammar, text: str, expected: str
) -> None:
    assert forced(byte_tokenizer, grammar, text) == expected


def test_of_long_text_the_beginning_is_looked_at_up_to_a_whole_character(byte_tokenizer: Tokenizer) -> None:
    text = "x" + 1000 * "é"
    found = forced(byte_tokenizer, Grammar.from_choices([text]))
    assert text.startswith(found)
    assert MAX_FORCED_BYTES - 8 < len(found.encode()) <= MAX_FORCED_BYTES


def test_no_special_token_is_forced_where_a_grammar_spells_one_out(byte_tokenizer: Tokenizer) -> None:
    assert forced(byte_tokenizer, Grammar.from_choices(["a<|x|>bc"])) == "a"


def test_a_grammar_that_takes_long_to_force_is_not_asked_again(byte_tokenizer: Tokenizer) -> None:
    vocabulary = llguidance.LLTokenizer(byte_tokenizer.to_json(), n_vocab=VOCAB, eos_token=[0])
    start = llguidance.LLMatcher(vocabulary, source_of(Grammar.from_choices(["hello"])), log_level=0)
    times = iter([0.0, 1.0])
    matcher = CompiledGrammar(start, num_words(VOCAB), vocabulary, lambda: next(times)).matcher()
    assert len(matcher.forced()) > 0
    assert matcher.forced() == ()


def test_names_of_a_schema_are_forced_in_the_model_s_own_tokens(small_model: ModelSource) -> None:
    tokenizer = small_model.tokenizer()
    matcher = matcher_of(tokenizer, Grammar.from_schema(SCHEMA), '{"name": "Bob", "', small_model.config.vocab_size)
    assert list(matcher.forced()) == tokenizer.encode("is_active")
