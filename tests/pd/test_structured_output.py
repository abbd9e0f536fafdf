"""Grammars through prefill and decode: each side compiles its own and follows the same tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema
import pytest
from random_schemas import random_schema

from diptych.engine.scheduler.grammar_thread import GrammarThread
from diptych.generation.finish import Finish
from diptych.generation.grammar import Grammar, GrammarKind
from diptych.generation.output import FailureCode
from diptych.grammars.compiler import Compiler
from diptych.tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.integration

VOCAB = 1000
CONTEXT = 2048
NUM_SCHEMAS = 200
VALIDATOR = jsonschema.Draft202012Validator
LETTERS = Grammar(GrammarKind.REGEX, "[A-Z]{6}")

Pair = Any  # the fixture's class: test helpers can't be imported


@pytest.fixture
def pair(make_pair: type[Pair], byte_tokenizer: Tokenizer) -> Iterator[Pair]:
    grammars = GrammarThread(lambda: Compiler(byte_tokenizer, VOCAB, byte_tokenizer.eos_ids))
    pages = 16 * CONTEXT // 4 + 1
    pair = make_pair(prefill_pages=pages, decode_pages=pages, context_len=CONTEXT, grammars=grammars)
    yield pair
    grammars.close()
    pair.assert_clean()


def text_of(pair: Pair, room: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(pair.tokens(room))


@pytest.mark.parametrize("first", range(0, NUM_SCHEMAS, 25))
def test_outputs_are_valid_under_random_schemas(pair: Pair, byte_tokenizer: Tokenizer, first: int) -> None:
    schemas = {seed: random_schema(Random(seed)) for seed in range(first, first + 25)}
    for seed, schema in schemas.items():
        pair.start_constrained(1 + seed, [1, 2, seed], Grammar.from_schema(schema), max_tokens=CONTEXT - 3)
    pair.run()
    for seed, schema in schemas.items():
        assert pair.decode.ended(1 + seed).finish is Finish.STOP
        VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).validate(
            json.loads(text_of(pair, 1 + seed, byte_tokenizer))
        )


def test_the_first_token_is_constrained_too_and_may_be_the_last(pair: Pair, byte_tokenizer: Tokenizer) -> None:
    pair.start_constrained(1, [5], Grammar(GrammarKind.REGEX, "true"), max_tokens=9)
    pair.run()
    assert text_of(pair, 1, byte_tokenizer) == "true"
    assert pair.prefill.tokens(1).keys() == {0}
    assert pair.decode.tokens(1) == {}
    assert pair.decode.ended(1).finish is Finish.STOP


def test_decode_takes_the_hand_off_when_its_own_grammar_is_compiled(pair: Pair, byte_tokenizer: Tokenizer) -> None:
    pair.start_constrained(1, [5], LETTERS, max_tokens=9)
    pair.compile(pair.prefill)
    pair.deliver(pair.decode)
    pair.step(pair.prefill)
    pair.deliver(pair.prefill)
    assert pair.num_written == 1
    assert not pair.step(pair.decode)
    pair.compile(pair.decode)
    pair.run()
    assert len(text_of(pair, 1, byte_tokenizer)) == 6


def test_prefill_computes_nothing_before_its_grammar_is_compiled(pair: Pair) -> None:
    pair.start_constrained(1, [5], LETTERS, max_tokens=9)
    pair.deliver(pair.decode)
    assert not pair.step(pair.prefill)
    pair.run()


@pytest.mark.parametrize("num_prior", [1, 3, 5])
def test_a_replay_goes_on_where_the_grammar_stood(pair: Pair, byte_tokenizer: Tokenizer, num_prior: int) -> None:
    pair.start_constrained(1, [5], LETTERS, max_tokens=9)
    pair.run()
    tokens = pair.tokens(1)
    pair.start_constrained(2, [5, *tokens[:num_prior]], LETTERS, 9 - num_prior, num_prior_output_tokens=num_prior)
    pair.run()
    assert pair.tokens(2) == tokens[num_prior:]


def test_a_replay_of_a_complete_output_ends_at_once(pair: Pair, byte_tokenizer: Tokenizer) -> None:
    tokens = byte_tokenizer.encode("ABCDEF")
    pair.start_constrained(1, [5, *tokens], LETTERS, 9, num_prior_output_tokens=6)
    pair.run()
    assert (pair.tokens(1), pair.decode.ended(1).finish) == ([0], Finish.STOP)


def test_a_replay_of_another_output_is_refused(pair: Pair, byte_tokenizer: Tokenizer) -> None:
    pair.start_constrained(1, [5, *byte_tokenizer.encode("7")], LETTERS, 9, num_prior_output_tokens=1)
    pair.run()
    failure = pair.prefill.ended(1).failure
    assert failure.code is FailureCode.INVALID
    assert "does not match the grammar" in failure.message


def test_a_grammar_that_can_not_be_compiled_fails_both_legs(pair: Pair) -> None:
    pair.start_constrained(1, [5], Grammar(GrammarKind.REGEX, "("), max_tokens=9)
    pair.run()
    failures = [side.ended(1).failure for side in (pair.prefill, pair.decode)]
    assert [failure.code for failure in failures] == [FailureCode.INVALID] * 2
    assert "unclosed group" in failures[0].message


@pytest.mark.parametrize("num_compiled", [0, 1, 2])
@pytest.mark.parametrize("num_moves", range(6))
@pytest.mark.parametrize("by_decode", [False, True])
def test_an_abort_at_any_moment_leaves_nothing_behind(
    pair: Pair, num_compiled: int, num_moves: int, by_decode: bool
) -> None:
    pair.start_constrained(1, [5] * 20, LETTERS, max_tokens=9)
    for side in (pair.prefill, pair.decode)[:num_compiled]:
        pair.compile(side)
    for move in [pair.deliver, pair.step, pair.step, pair.deliver, pair.deliver, pair.step][:num_moves]:
        move(pair.decode if move == pair.deliver and pair.decode.outbox else pair.prefill)
    side = pair.decode if by_decode else pair.prefill
    pair.abort(side, 1)
    pair.run()
    assert side.ended(1) is not None
