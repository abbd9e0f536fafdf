from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
import tokenizers
from bombs import ambiguous
from random_schemas import random_schema
from tokenizers import decoders, models, normalizers, pre_tokenizers

from diptych.checkpoints.source import ModelSource
from diptych.common.errors import ConfigError, InvalidRequest
from diptych.generation.grammar import Grammar, GrammarKind, Preamble, num_words
from diptych.grammars.compiler import Compiler
from diptych.grammars.matcher import (
    CHEAP_S,
    FREE_S,
    FREE_S_PER_TOKEN,
    MAX_SHARED_TOKENS,
    TOO_SLOW,
    CompiledGrammar,
    GrammarMatcher,
    Lend,
)
from diptych.grammars.source import MAX_STEP_ITEMS, check, limits, source_of
from diptych.tokens.tokenizer import Tokenizer

VOCAB = 300
EOS, SPECIAL = 0, 1
NUM_SCHEMAS = 200
VALIDATOR = jsonschema.Draft202012Validator


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def ebnf(text: str) -> Grammar:
    return Grammar(GrammarKind.EBNF, text)


def allowed(matcher: GrammarMatcher) -> list[int]:
    mask = matcher.new_mask(2)
    matcher.fill_mask(mask, 1)
    assert (mask[0] == -1).all(), "another row was touched"
    return np.flatnonzero(np.unpackbits(mask[1].view(np.uint8), bitorder="little")).tolist()


def write(matcher: GrammarMatcher, rng: Random, max_tokens: int = 2000) -> list[int]:
    """Let chance choose among the allowed tokens until the output ends."""
    output: list[int] = []
    while not matcher.is_finished:
        output.append(rng.choice(allowed(matcher)))
        assert len(output) < max_tokens, "the output does not end"
        matcher.accept(output[-1:])
        assert matcher.error is None
    return output


TAGS = {
    "triggers": ["<f"],
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer", "minimum": 10, "maximum": 99}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"const": "x"}, "end": ";"},
    ],
}


def llama_tokenizer() -> Tokenizer:
    """Byte fallback, and a mark for blanks: as of Llama 2, Mistral, Gemma and Phi-3."""
    vocab = {"</s>": 0, "<s>": 1, "<unk>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in ["▁", *'{}[]":,-.0123456789abcdefghijklmnopqrstuvwxyzé', "ab", '▁"', '":', '{"', "12", "▁a"]:
        vocab.setdefault(token, len(vocab))
    merges = [("a", "b"), ("▁", '"'), ('"', ":"), ("{", '"'), ("1", "2"), ("▁", "a")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    special = [tokenizers.AddedToken(text, special=True) for text in ("</s>", "<s>", "<unk>")]
    backend.add_special_tokens(special)
    return Tokenizer(backend, eos_ids=(0,), chat_template=None)


@pytest.fixture
def compiler(byte_tokenizer: Tokenizer) -> Compiler:
    return Compiler(byte_tokenizer, VOCAB, [EOS])


Ids = Callable[..., list[int]]


@pytest.fixture
def ids(byte_tokenizer: Tokenizer) -> Ids:
    return lambda *texts: sorted(byte_tokenizer.encode(text)[0] for text in texts)


def test_the_mask_allows_exactly_the_tokens_that_may_come_next(compiler: Compiler, ids: Ids) -> None:
    matcher = compiler.compile(regex("[12]x?|true")).matcher()
    assert allowed(matcher) == ids("1", "2", "t", "tr", "true")
    matcher.accept(ids("1"))
    assert allowed(matcher) == sorted([EOS, *ids("x")])
    matcher.accept(ids("x"))
    assert (matcher.is_finished, matcher.error) == (True, None)


def test_an_output_that_may_go_on_ends_with_the_end_of_sequence(compiler: Compiler, ids: Ids) -> None:
    matcher = compiler.compile(regex("x+")).matcher()
    matcher.accept(ids("x"))
    assert (matcher.is_finished, allowed(matcher)) == (False, sorted([EOS, *ids("x")]))
    matcher.accept([EOS])
    assert (matcher.is_finished, matcher.error) == (True, None)


def test_each_end_of_sequence_token_ends_the_output(byte_tokenizer: Tokenizer) -> None:
    matcher = Compiler(byte_tokenizer, VOCAB, [EOS, SPECIAL]).compile(regex("x*")).matcher()
    assert allowed(matcher)[:2] == [EOS, SPECIAL]
    matcher.accept([SPECIAL])
    assert matcher.is_finished
    matcher.accept([SPECIAL])  # after the end
    assert matcher.error is None


@pytest.mark.parametrize("grammar", [regex("(?s:.)*"), ebnf('root ::= "<|x|>" | "</s>"'), Grammar.from_schema({})])
def test_special_tokens_are_never_part_of_an_output(compiler: Compiler, grammar: Grammar) -> None:
    matcher = compiler.compile(grammar).matcher()
    for _ in range(5):
        tokens = allowed(matcher)
        assert SPECIAL not in tokens
        assert max(tokens) < 267, "a token beyond the vocabulary"
        matcher.accept(tokens[-1:])


def test_a_special_token_written_out_is_text(compiler: Compiler, byte_tokenizer: Tokenizer) -> None:
    output = write(compiler.compile(ebnf('root ::= "<|x|>"')).matcher(), Random(0))
    assert byte_tokenizer.decode(output, skip_special_tokens=False) == "<|x|>"
    assert SPECIAL not in output


def test_a_wrong_token_is_an_error_that_stays(compiler: Compiler, ids: Ids) -> None:
    matcher = compiler.compile(regex("x")).matcher()
    matcher.accept(ids("y"))
    assert matcher.error
    matcher.accept(ids("x"))
    assert matcher.error
    assert "\n<state>" not in matcher.error


def test_matchers_of_one_grammar_do_not_disturb_each_other(compiler: Compiler, ids: Ids) -> None:
    compiled = compiler.compile(regex("xy|z"))
    first, second = compiled.matcher(), compiled.matcher()
    first.accept(ids("x"))
    assert (allowed(first), allowed(second)) == (ids("y"), ids("x", "z"))


def test_a_compiled_grammar_wears_out_by_its_matchers_tokens(compiler: Compiler, ids: Ids) -> None:
    compiled = compiler.compile(regex("x*"))
    for _ in range(2):
        assert not compiled.is_worn
        compiled.matcher().accept(ids("x") * (MAX_SHARED_TOKENS // 2 + 1))
    assert compiled.is_worn


@pytest.mark.parametrize("first", range(0, NUM_SCHEMAS, 50))
@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_outputs_are_valid_under_random_schemas(byte_tokenizer: Tokenizer, kind: str, first: int) -> None:
    tokenizer = byte_tokenizer if kind == "byte-level" else llama_tokenizer()
    compiler = Compiler(tokenizer, 320, tokenizer.eos_ids)
    for seed in range(first, first + 50):
        schema = random_schema(Random(seed))
        check(Grammar.from_schema(schema))
        output = write(compiler.compile(Grammar.from_schema(schema)).matcher(), Random(seed))
        value = json.loads(tokenizer.decode(output))
        VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).validate(value)


def test_outputs_of_the_small_models_vocabulary_are_valid_too(small_model: ModelSource) -> None:
    tokenizer = small_model.tokenizer()
    compiler = Compiler(tokenizer, small_model.config.vocab_size, small_model.config.eos_ids)
    for seed in range(50):
        schema = random_schema(Random(seed))
        output = write(compiler.compile(Grammar.from_schema(schema)).matcher(), Random(seed))
        VALIDATOR(schema).validate(json.loads(tokenizer.decode(output)))


def test_blanks_between_json_tokens_are_bounded(compiler: Compiler, ids: Ids) -> None:
    matcher = compiler.compile(Grammar.from_schema({"type": "array", "items": {"type": "null"}})).matcher()
    matcher.accept(ids("["))
    matcher.accept(ids(" ") * 31)
    assert ids(" ")[0] in allowed(matcher)
    matcher.accept(ids(" "))
    assert ids(" ")[0] not in allowed(matcher)


def test_choices_are_taken_literally(compiler: Compiler, byte_tokenizer: Tokenizer) -> None:
    choices = ["a.b", "(", "ü x", "a|b\\", "\n", "1-2 #~&"]
    compiled = compiler.compile(Grammar.from_choices(choices))
    outputs = {byte_tokenizer.decode(write(compiled.matcher(), Random(seed))) for seed in range(60)}
    assert outputs == set(choices)


BAD: dict[str, tuple[Grammar, str]] = {
    "no JSON": (Grammar(GrammarKind.JSON_SCHEMA, "{"), "not valid JSON"),
    "no object": (Grammar(GrammarKind.JSON_SCHEMA, "true"), "must be an object"),
    "an unknown keyword's value": (Grammar.from_schema({"type": "float"}), "Invalid type"),
    "an unsupported keyword": (Grammar.from_schema({"not": {}}), "not"),
    "an unknown format": (Grammar.from_schema({"format": "colour", "type": "string"}), "colour"),
    "the impossible": (Grammar.from_schema({"enum": []}), "Unsatisfiable"),
    "repeatable keys that count": (
        Grammar.from_schema({"items": {"minProperties": 2}}),
        "minProperties 2 is not supported",
    ),
    "nesting": (Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000), "recursion"),
    "a broken regex": (regex("[a"), "unclosed"),
    "a broken grammar": (ebnf("root ::= a"), "'a' not found"),
}


@pytest.mark.parametrize(("grammar", "words"), BAD.values(), ids=BAD.keys())
def test_what_can_not_be_compiled_is_refused_in_the_compilers_words(
    compiler: Compiler, grammar: Grammar, words: str
) -> None:
    attempts: list[Callable[[Grammar], Any]] = [check, compiler.compile]
    for attempt in attempts:
        with pytest.raises(InvalidRequest, match=f"^{grammar.kind.value} can't be compiled: ") as caught:
            attempt(grammar)
        assert words in str(caught.value)
        assert "llguidance" not in str(caught.value)
        assert caught.value.param == grammar.kind.value


@pytest.mark.parametrize(
    ("output", "is_right"),
    [
        ("free <text> alone", True),
        ('a <f=a>42</f> b <f=b>"x"; c', True),
        ("<f=a>7</f>", False),
        ("<f=a>42;", False),
        ("then <f=c>", False),
        ("<f=b>", False),
    ],
)
def test_behind_a_trigger_comes_a_tagged_part(
    compiler: Compiler, byte_tokenizer: Tokenizer, output: str, is_right: bool
) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(TAGS))).matcher()
    for token in byte_tokenizer.encode(output):
        if token not in allowed(matcher):
            assert not is_right
            return
        matcher.accept([token])
    assert (EOS in allowed(matcher)) == is_right


def test_a_grammar_that_nothing_matches_is_refused(compiler: Compiler) -> None:
    with pytest.raises(InvalidRequest, match=r"^ebnf can't be compiled: nothing can match it$"):
        compiler.compile(ebnf('root ::= root "a"'))


def test_a_tokenizer_may_have_tokens_that_the_model_lacks(byte_tokenizer: Tokenizer, ids: Ids) -> None:
    matcher = Compiler(byte_tokenizer, 250, [EOS]).compile(regex("(?s:.)*")).matcher()
    assert matcher.new_mask(3).shape == (3, 8)
    assert max(allowed(matcher)) < 256
    assert set(allowed(matcher)) > set(ids("1", "2"))


def test_keys_that_are_required_may_be_counted() -> None:
    schema = {"properties": {"minProperties": {"const": {"minProperties": 9}}, "b": True}, "minProperties": 2}
    check(Grammar.from_schema({**schema, "required": ["minProperties", "b"]}))


def test_a_tokenizer_that_can_not_be_mapped_to_bytes_is_refused() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    blanks = llama_tokenizer().to_json()
    wrong = tokenizers.Tokenizer.from_str(blanks)
    wrong.normalizer, wrong.pre_tokenizer = normalizers.Sequence([]), pre_tokenizers.Metaspace()
    wrong.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    for backend in (words, wrong):
        with pytest.raises(ConfigError, match="structured output does not work with this tokenizer"):
            Compiler(Tokenizer(backend, eos_ids=(0,), chat_template=None), 320, [0])


@pytest.mark.parametrize(
    ("preamble", "good", "bad"),
    [
        (Preamble("", "</t>"), ["Hm < a</t>\n\n((x))", "</t>x"], ["x", "a</t>y"]),
        (Preamble("<t>", "</t>"), ["<t>Hm</t>(x)", "((x))"], ["Hm</t>x", "<t>x"]),
    ],
)
def test_free_text_may_come_first(
    compiler: Compiler, byte_tokenizer: Tokenizer, preamble: Preamble, good: list[str], bad: list[str]
) -> None:
    grammar = Grammar(GrammarKind.EBNF, 'root ::= "(" root ")" | "x"', preamble)
    check(grammar)
    compiled = compiler.compile(grammar)
    for text in (*good, *bad):
        matcher = compiled.matcher()
        matcher.accept(byte_tokenizer.encode(text))
        assert (matcher.error is None and matcher.is_finished) == (text in good), text


class Clock:
    """Each reading is later by `step_s`."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += self.step_s
        return self._now_s


def matcher_of(tokenizer: Tokenizer, grammar: Grammar, clock: Clock, lend: Lend | None = None) -> GrammarMatcher:
    vocabulary = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=VOCAB, eos_token=[EOS])
    matcher = llguidance.LLMatcher(vocabulary, source_of(grammar), log_level=0, limits=limits())
    return CompiledGrammar(matcher, num_words(VOCAB), vocabulary, clock).matcher(lend)


def tokens_until_too_slow(matcher: GrammarMatcher, token: int, most: int) -> int:
    for count in range(most):
        if matcher.error is not None:
            assert matcher.error == TOO_SLOW
            return count
        allowed(matcher)
        matcher.accept([token])
    return most


def test_an_output_whose_masks_take_too_long_fails(byte_tokenizer: Tokenizer, ids: Ids) -> None:
    cheap, dear = (
        matcher_of(byte_tokenizer, regex("x*"), Clock(step_s)) for step_s in (FREE_S_PER_TOKEN / 2, FREE_S / 8)
    )
    (token,) = ids("x")
    assert tokens_until_too_slow(dear, token, 100) in range(4, 6), "two readings a token"
    assert tokens_until_too_slow(cheap, token, 3000) == 3000


def test_an_output_that_was_slow_once_may_go_on(byte_tokenizer: Tokenizer, ids: Ids) -> None:
    clock = Clock(FREE_S / 4)
    matcher = matcher_of(byte_tokenizer, regex("x*"), clock)
    (token,) = ids("x")
    assert tokens_until_too_slow(matcher, token, 1) == 1
    clock.step_s = 0.0
    assert tokens_until_too_slow(matcher, token, 1000) == 1000


def test_what_an_output_takes_beyond_its_tokens_is_owed_once_and_little_is_free(
    byte_tokenizer: Tokenizer, ids: Ids
) -> None:
    lent_s: list[float] = []
    clock = Clock(CHEAP_S / 2)  # two readings a token: a step each for its mask and for itself

    def lend(seconds: float) -> bool:
        lent_s.append(seconds)
        return len(lent_s) != 3

    matcher = matcher_of(byte_tokenizer, regex("x*"), clock, lend)
    (token,) = ids("x")
    count = tokens_until_too_slow(matcher, token, 100)
    assert len(lent_s) in (3, 4), "the third was too much"
    taken_s = count * (CHEAP_S - FREE_S_PER_TOKEN)
    assert sum(lent_s) == pytest.approx(taken_s - CHEAP_S, abs=CHEAP_S / 2 + FREE_S_PER_TOKEN)


@pytest.mark.parametrize("num_properties", [20, 100])
def test_ordinary_objects_need_a_third_of_the_items_of_a_mask(small_model: ModelSource, num_properties: int) -> None:
    source, config = small_model, small_model.config
    vocabulary = llguidance.LLTokenizer(
        source.tokenizer().to_json(), n_vocab=config.vocab_size, eos_token=list(config.eos_ids)
    )
    third = llguidance.LLParserLimits(step_max_items=MAX_STEP_ITEMS // 3 + 100, verbose_errors=False)
    properties = {f"p{index}": {"type": "integer", "maximum": 9} for index in range(num_properties)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    start = llguidance.LLMatcher(vocabulary, source_of(Grammar.from_schema(schema)), log_level=0, limits=third)
    compiled = CompiledGrammar(start, num_words(config.vocab_size), vocabulary)
    matcher = compiled.matcher()
    write(matcher, Random(1))
    assert matcher.error is None


def test_a_mask_of_too_many_items_is_not_computed(small_model: ModelSource) -> None:
    compiler = Compiler(small_model.tokenizer(), small_model.config.vocab_size, small_model.config.eos_ids)
    with pytest.raises(InvalidRequest, match=r"Too many items \(limit 4000; mask\)"):
        compiler.compile(ambiguous(6))
