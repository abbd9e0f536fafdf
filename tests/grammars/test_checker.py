"""The process that checks grammars: what is too much ends it, and nothing else."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from bombs import ambiguous, memory_bomb, time_bomb

from diptych.generation.grammar import Grammar, GrammarKind, Preamble
from diptych.grammars.check_terms import MAX_BYTES
from diptych.grammars.checker import Checked, Checker, Outcome
from diptych.grammars.source import source_of

pytestmark = pytest.mark.integration

GOOD = Grammar(GrammarKind.REGEX, "a+", Preamble("", "</t>"))


@pytest.fixture(scope="module")
def shared_checker() -> Iterator[Checker]:
    checker = Checker()
    yield checker
    checker.close()


@pytest.fixture
def checker(shared_checker: Checker) -> Iterator[Checker]:
    """And whatever a test did to it, the next grammar is checked."""
    yield shared_checker
    assert check(shared_checker, GOOD).verdict.outcome is Outcome.PASSED


def check(checker: Checker, grammar: Grammar) -> Checked:
    checker.start()
    checker.begin()
    return checker.check(grammar)


def test_what_passes_is_handed_back_for_the_compiler(checker: Checker) -> None:
    assert check(checker, GOOD).source == source_of(GOOD)


def test_what_the_compiler_refuses_is_told_in_its_words_by_the_same_process(checker: Checker) -> None:
    checker.start()
    pid = checker.pid
    verdict = check(checker, Grammar(GrammarKind.REGEX, "(a")).verdict
    assert verdict.outcome is Outcome.REFUSED
    assert "unclosed group" in verdict.words
    assert checker.pid == pid


@pytest.mark.parametrize("bomb", [memory_bomb(), time_bomb(), ambiguous(16)], ids=["memory", "rules", "ambiguity"])
def test_what_takes_too_much_is_refused_in_words_and_costs_nobody_else_memory(checker: Checker, bomb: Grammar) -> None:
    before = psutil.Process().memory_info().rss
    checked = check(checker, bomb)
    assert checked.verdict.outcome in (Outcome.TIME, Outcome.MEMORY)
    assert checked.verdict.words.startswith(f"{bomb.kind.value} takes more than ")
    assert "fewer patterns in `allOf`" in checked.verdict.words
    assert checked.took_s < 2, "of the CPU"
    assert psutil.Process().memory_info().rss - before < 16 << 20


def test_the_process_has_limits_and_no_secret(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_AUTH_TOKEN", "a-secret-of-the-platform")
    checker.close()
    assert check(checker, GOOD).verdict.outcome is Outcome.PASSED
    process = psutil.Process(checker.pid)
    soft, _ = process.rlimit(psutil.RLIMIT_AS)
    assert process.memory_info().vms < soft <= process.memory_info().vms + MAX_BYTES
    assert process.rlimit(psutil.RLIMIT_CORE)[0] == 0
    assert not [name for name in process.environ() if name.startswith("DIPTYCH")]
    modules = Path(f"/proc/{checker.pid}/maps").read_text()
    assert "llguidance" in modules
    assert "numpy" not in modules
    assert "tokenizers" not in modules


def test_a_process_that_somebody_ended_is_replaced_and_the_check_done(checker: Checker) -> None:
    checker.start()
    pid = checker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert check(checker, GOOD).verdict.outcome is Outcome.PASSED
    assert checker.pid != pid


def test_a_check_that_nobody_waits_for_is_ended(checker: Checker) -> None:
    checker.start()
    process = psutil.Process(checker.pid)
    process.suspend()  # it will never answer
    checker.begin()
    found: list[Checked] = []
    thread = threading.Thread(target=lambda: found.append(checker.check(GOOD)))
    thread.start()
    checker.interrupt()
    thread.join()
    assert found[0].verdict.outcome is Outcome.LEFT
    assert not process.is_running()


def test_a_check_is_ended_before_it_began(checker: Checker) -> None:
    checker.begin()
    checker.interrupt()
    assert checker.check(memory_bomb()).verdict.outcome is Outcome.LEFT
