from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from random_schemas import random_schema
from tokenizers import decoders, models, normalizers, pre_tokenizers

from diptych.common.errors import ConfigError, InvalidRequest
from diptych.engine.grammar.compiler import Compiler, check
from diptych.engine.grammar.grammar import Grammar, GrammarKind, Preamble
from diptych.engine.grammar.matcher import MAX_SHARED_TOKENS, GrammarMatcher
from diptych.engine.loader.source import ModelSource
from diptych.engine.loader.tokenizer import Tokenizer

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


@pytest.mark.model
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
