"""Whatever a schema, pattern or grammar says: it is answered within the limits, and what passes can be followed here.

A grammar that ends its process is a verdict like any other. What is compiled here has passed before, under a limit of
memory that an explosion would meet, not the machine.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from fuzzing import fuzz, malformed
from hypothesis import given
from hypothesis import strategies as st
from random_schemas import random_schema

from diptych.common.errors import InvalidRequest
from diptych.generation.grammar import Grammar, GrammarKind, Preamble
from diptych.grammars.checker import Checker, Outcome
from diptych.grammars.compiler import Compiler
from diptych.tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.integration

MAX_GROWTH_BYTES = 2 << 30  # of address space, by all that passed
ATOMS = ("a", "b", ".", r"\d", r"\w", "[^a]", r"\p{L}", "é", "(?i:a)")

SMALL = st.integers(0, 40)


def patterns() -> st.SearchStrategy[str]:
    """Well-formed ones, nested and repeated."""
    return st.recursive(
        st.sampled_from(ATOMS),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=4).map("".join),
            st.lists(inner, min_size=1, max_size=4).map(lambda parts: f"({'|'.join(parts)})"),
            st.builds("({}){}".format, inner, st.sampled_from(("*", "+", "?", "{3}", "{0,40}", "{7,}"))),
        ),
        max_leaves=12,
    )


def schemas() -> st.SearchStrategy[Any]:
    strings = st.fixed_dictionaries(
        {"type": st.just("string")}, optional={"pattern": patterns(), "minLength": SMALL, "maxLength": SMALL}
    )
    numbers = st.fixed_dictionaries(
        {"type": st.sampled_from(("integer", "number"))},
        optional={"minimum": st.floats(width=32), "maximum": SMALL, "multipleOf": SMALL | st.floats(0, 3)},
    )
    ordinary = st.integers(0, 500).map(lambda seed: random_schema(Random(seed)))
    return st.recursive(
        st.one_of(strings, numbers, ordinary, st.booleans(), st.just({"$ref": "#"})),
        lambda inner: st.one_of(
            st.builds(lambda key, parts: {key: parts}, st.sampled_from(("allOf", "anyOf", "oneOf")), _few(inner)),
            st.builds(
                lambda parts: {"type": "object", "properties": parts}, st.dictionaries(st.text(max_size=3), inner)
            ),
            st.builds(lambda parts: {"patternProperties": parts}, st.dictionaries(patterns(), inner, max_size=3)),
            st.builds(lambda one, most: {"type": "array", "items": one, "maxItems": most}, inner, SMALL),
            st.builds(
                lambda many: {"type": "string", "allOf": [{"pattern": f"^({one})*$"} for one in many]}, _few(patterns())
            ),
        ),
        max_leaves=8,
    )


def rules() -> st.SearchStrategy[str]:
    """GBNF over a few rules that may refer to each other, and to themselves."""
    names = [f"r{index}" for index in range(5)]
    item = st.one_of(st.sampled_from(names), st.sampled_from(('"a"', '"b"', '""', "[a-z ]", "[^a]")))
    part = st.builds("{}{}".format, item, st.sampled_from(("", "", "*", "+", "?", "{2,9}")))
    body = st.lists(st.lists(part, min_size=1, max_size=4).map(" ".join), min_size=1, max_size=5).map(" | ".join)
    bodies = st.lists(body, min_size=len(names), max_size=len(names))
    return bodies.map(lambda all_: "root ::= r0\n" + "\n".join(map("{} ::= {}".format, names, all_)))


def _few(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(inner, min_size=1, max_size=6)


def grammars() -> st.SearchStrategy[Grammar]:
    broken = malformed(b'{"type": "string", "pattern": "^a+$"}', b'root ::= "a" root | [b-c]{2,3}', rb"(a|b{2,3}\d)*")
    return st.one_of(
        st.builds(lambda schema: Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), schemas()),
        st.builds(Grammar, st.just(GrammarKind.REGEX), patterns() | st.text(max_size=30)),
        st.builds(Grammar, st.just(GrammarKind.EBNF), rules()),
        st.builds(Grammar, st.sampled_from(GrammarKind), broken.map(lambda data: data.decode(errors="replace"))),
    )


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    checker = Checker()
    yield checker
    checker.close()


@pytest.fixture(scope="module")
def compiler(byte_tokenizer: Tokenizer) -> Compiler:
    return Compiler(byte_tokenizer, 300, byte_tokenizer.eos_ids)


@pytest.fixture(scope="module", autouse=True)
def _limited() -> Iterator[None]:
    with open("/proc/self/statm") as statm:
        own = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (own + MAX_GROWTH_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@fuzz
@given(grammars(), st.sampled_from((None, None, Preamble("", "</t>"), Preamble("<t>", '"\n'))), st.randoms())
def test_each_is_answered_and_what_passes_can_be_followed(
    checker: Checker, compiler: Compiler, grammar: Grammar, preamble: Preamble | None, rng: Random
) -> None:
    grammar = Grammar(grammar.kind, grammar.text, preamble)
    checker.start()
    checker.begin()
    checked = checker.check(grammar)
    assert checked.verdict.outcome in (Outcome.PASSED, Outcome.REFUSED, Outcome.TIME, Outcome.MEMORY)
    if checked.verdict.outcome is not Outcome.PASSED:
        assert checked.verdict.words.startswith(grammar.kind.value)
        return
    try:
        matcher = compiler.compile(grammar, checked.source).matcher()
    except InvalidRequest:
        return
    for _ in range(30):
        mask = matcher.new_mask(1)
        matcher.fill_mask(mask, 0)
        tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if matcher.error is not None or matcher.is_finished or not len(tokens):
            break
        matcher.accept([rng.choice(tokens.tolist())])
