from __future__ import annotations

import pytest

from diptych.generation.grammar import Grammar, GrammarKind, Preamble
from diptych.grammars.checker import LIMIT_KEPT_S, Outcome, Verdict, Verdicts

PASSED = Verdict(Outcome.PASSED)


def regex(text: str, preamble: Preamble | None = None) -> Grammar:
    return Grammar(GrammarKind.REGEX, text, preamble)


def test_the_verdicts_used_last_are_kept() -> None:
    verdicts = Verdicts(2)
    verdicts.add(regex("a"), PASSED, 0.0)
    verdicts.add(regex("b"), Verdict(Outcome.REFUSED, "no"), 0.0)
    assert verdicts.find(regex("a"), 0.0) == PASSED
    verdicts.add(regex("c"), PASSED, 0.0)
    assert (verdicts.find(regex("b"), 0.0), verdicts.find(regex("a"), 1e9), len(verdicts)) == (None, PASSED, 2)


@pytest.mark.parametrize("outcome", [Outcome.TIME, Outcome.MEMORY])
def test_what_reached_a_limit_may_be_tried_again_later(outcome: Outcome) -> None:
    verdicts, verdict = Verdicts(), Verdict(outcome, "too much")
    verdicts.add(regex("a"), verdict, 10.0)
    assert verdicts.find(regex("a"), 9.0 + LIMIT_KEPT_S) == verdict
    assert verdicts.find(regex("a"), 10.0 + LIMIT_KEPT_S) is None
    assert len(verdicts) == 0


@pytest.mark.parametrize("outcome", [Outcome.LEFT, Outcome.FAILED])
def test_a_check_without_an_end_says_nothing(outcome: Outcome) -> None:
    verdicts = Verdicts()
    verdicts.add(regex("a"), Verdict(outcome), 0.0)
    assert len(verdicts) == 0


def test_grammars_that_differ_anywhere_differ() -> None:
    grammars = [
        regex("a"),
        regex("\udc80"),
        Grammar(GrammarKind.EBNF, "a"),
        regex("a", Preamble("", "x")),
        regex("a", Preamble("x", "")),
        regex("x\0a", Preamble("", "")),
        regex("a", Preamble("", "x\0")),
    ]
    verdicts = Verdicts()
    for index, grammar in enumerate(grammars):
        verdicts.add(grammar, Verdict(Outcome.REFUSED, str(index)), 0.0)
    found = [verdicts.find(grammar, 0.0) for grammar in grammars]
    assert found == [Verdict(Outcome.REFUSED, str(index)) for index in range(len(grammars))]
