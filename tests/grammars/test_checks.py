"""Whose grammars are checked when, and what becomes of those who wait. The checks themselves are scripted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from diptych.common.errors import InvalidRequest, Overloaded, Unavailable
from diptych.generation.grammar import Grammar, GrammarKind
from diptych.grammars.checker import Checked, Checker, Outcome, Verdict
from diptych.grammars.checks import LIMITS, NUM_PROCESSES, GrammarChecks

PASSED = Checked(Verdict(Outcome.PASSED), 0.001, "source")
TOO_SLOW = Checked(Verdict(Outcome.TIME, "takes too long"), 1.1)


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


class Script:
    """What checkers find: a text that begins with `bomb` lasts until it is ended, `slow` is refused for its time."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.begun: list[str] = []
        self.ended: list[str] = []  # that nobody waited for
        self.closed = 0

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(is_so, 100)


class ScriptedChecker(Checker):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self._ending = threading.Event()

    def start(self) -> None:
        pass

    def begin(self) -> None:
        self._ending.clear()

    def check(self, grammar: Grammar) -> Checked:
        with self._script.changed:
            self._script.begun.append(grammar.text)
            self._script.changed.notify_all()
        if grammar.text.startswith("broken"):
            raise OSError("no more processes")
        if grammar.text.startswith("slow"):
            return TOO_SLOW
        if not grammar.text.startswith("bomb"):
            return PASSED
        self._ending.wait()
        with self._script.changed:
            self._script.ended.append(grammar.text)
            self._script.changed.notify_all()
        return Checked(Verdict(Outcome.LEFT), 1.1)

    def interrupt(self) -> None:
        self._ending.set()

    def close(self) -> None:
        with self._script.changed:
            self._script.closed += 1


def with_checks(test: Callable[[GrammarChecks, Script], Awaitable[None]]) -> GrammarChecks:
    """Run `test`, and see that nothing is left."""
    script = Script()
    checks = GrammarChecks(open_checker=lambda: ScriptedChecker(script), clock=lambda: 0.0)

    async def run() -> None:
        await test(checks, script)
        await asyncio.to_thread(checks.close)

    asyncio.run(run())
    assert (checks.num_waiting, checks.num_running, checks._checks) == (0, 0, {})
    assert script.closed == len(checks._threads)
    return checks


def test_another_tenants_grammar_is_checked_while_a_bomb_runs() -> None:
    async def test(checks: GrammarChecks, script: Script) -> None:
        bombs = [asyncio.ensure_future(checks.check(regex(f"bomb{index}"), "mallory")) for index in range(8)]
        await asyncio.to_thread(script.wait_for, lambda: script.begun == ["bomb0"])
        for index in range(20):
            await checks.check(regex(f"x{index}"), "alice")
        assert [text for text in script.begun if text.startswith("bomb")] == ["bomb0"]
        assert script.ended == []
        for bomb in bombs:
            bomb.cancel()
        await asyncio.wait(bombs)

    with_checks(test)


def test_a_client_that_leaves_ends_its_check_and_those_that_wait_are_never_begun() -> None:
    async def test(checks: GrammarChecks, script: Script) -> None:
        running, waiting = (asyncio.ensure_future(checks.check(regex(text), "a")) for text in ("bomb", "later"))
        await asyncio.to_thread(script.wait_for, lambda: script.begun == ["bomb"])
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert script.ended == []
        running.cancel()
        await asyncio.wait((running,))
        await asyncio.to_thread(script.wait_for, lambda: script.ended == ["bomb"])
        await checks.check(regex("next"), "a")
        assert script.begun == ["bomb", "next"]

    assert with_checks(test).counts["left"] == 2


def test_what_was_checked_is_not_checked_again_by_whomever() -> None:
    async def test(checks: GrammarChecks, script: Script) -> None:
        for tenant in ("a", "b"):
            await checks.check(regex("x"), tenant)
            with pytest.raises(InvalidRequest, match="takes too long") as caught:
                await checks.check(regex("slow"), tenant)
            assert caught.value.param == "regex"
        assert script.begun == ["x", "slow"]

    assert with_checks(test).counts["known"] == 2


def test_the_same_grammar_many_times_at_once_is_checked_once_a_process() -> None:
    async def test(checks: GrammarChecks, script: Script) -> None:
        await asyncio.gather(*[checks.check(regex("x"), f"t{index}") for index in range(20)])
        assert script.begun.count("x") <= NUM_PROCESSES

    counts = with_checks(test).counts
    assert counts["known"] + counts["passed"] == 20


def test_a_tenant_whose_grammars_take_too_long_is_turned_away_for_a_while() -> None:
    async def test(checks: GrammarChecks, script: Script) -> None:
        asked = [asyncio.ensure_future(checks.check(regex(f"slow{index}"), "mallory")) for index in range(20)]
        await asyncio.wait(asked)
        errors = [task.exception() for task in asked]
        assert len(script.begun) == 3 == sum(isinstance(error, InvalidRequest) for error in errors)
        turned_away = [error for error in errors if isinstance(error, Overloaded)]
        assert len(turned_away) == 17
        assert {error.retry_after_s for error in turned_away} == {2}  # owes 3.15 s, may owe 3, pays 0.1 s a second
        with pytest.raises(Overloaded, match="try again later"):
            await checks.check(regex("other"), "mallory")
        await checks.check(regex("other"), "alice")

    assert with_checks(test).counts["turned_away"] == 18


def test_a_check_that_can_not_be_made_is_answered_and_may_be_tried_again() -> None:
    async def test(checks: GrammarChecks, script: Script) -> None:
        for _ in range(2 * NUM_PROCESSES):
            with pytest.raises(Unavailable, match="regex could not be checked: try again"):
                await checks.check(regex("broken"), "a")
        await checks.check(regex("x"), "a")

    assert with_checks(test).counts["failed"] == 2 * NUM_PROCESSES


def test_a_full_queue_turns_away_without_blaming_the_tenant() -> None:
    async def run() -> None:
        script = Script()
        limits = replace(LIMITS, max_waiting=1)
        checks = GrammarChecks(limits, lambda: ScriptedChecker(script), lambda: 0.0)
        bombs = []
        for name in ("a", "b"):
            bombs.append(asyncio.ensure_future(checks.check(regex(f"bomb {name}"), name)))
            await asyncio.to_thread(script.wait_for, lambda: len(script.begun) == len(bombs))
        waiting = asyncio.ensure_future(checks.check(regex("x"), "c"))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="try again later"):
            await checks.check(regex("y"), "d")
        await asyncio.to_thread(checks.close)
        for task in (*bombs, waiting):
            with pytest.raises(Unavailable, match="stopping"):
                await task

    asyncio.run(run())


def test_without_grammars_there_is_no_thread_and_no_process() -> None:
    async def test(checks: GrammarChecks, script: Script) -> None:
        assert checks._threads == []

    with_checks(test)
