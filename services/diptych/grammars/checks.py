"""Checks the grammars of clients beside a router's event loop, so that none costs the router time or memory.

A few processes check, one grammar each at a time; `CheckQueue` says whose is next, and `Verdicts` what is known.
Threads and processes start with the first check that is needed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from diptych.common.errors import InvalidRequest, Overloaded, Unavailable
from diptych.generation.grammar import Grammar
from diptych.grammars.check_queue import CheckQueue, QueueLimits, Refused
from diptych.grammars.checker import Checked, Checker, Outcome, Verdict, Verdicts

logger = logging.getLogger(__name__)

NUM_PROCESSES: Final = 2  # so that one tenant alone, which gets one, keeps nobody waiting
LIMITS: Final = QueueLimits(max_waiting=1024, max_tenant_waiting=256, free_s=0.05, max_debt_s=3.0, payback=0.1)
KNOWN: Final = "known"  # beside the outcomes of checks, what became of grammars that were not checked
TURNED_AWAY: Final = "turned_away"


@dataclass(slots=True)
class _Check:
    grammar: Grammar
    future: Future[Verdict] = field(default_factory=Future)
    checker: Checker | None = None  # that is at it


class GrammarChecks:
    """Owns the threads and processes. `check` from any event loop."""

    def __init__(
        self,
        limits: QueueLimits = LIMITS,
        open_checker: Callable[[], Checker] = Checker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._open_checker = open_checker
        self._changed = threading.Condition()  # guards all below
        self._queue = CheckQueue(limits)
        self._verdicts = Verdicts()
        self._checks: dict[int, _Check] = {}
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        self.counts: Counter[str] = Counter({KNOWN: 0, TURNED_AWAY: 0, **{outcome.value: 0 for outcome in Outcome}})

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_running(self) -> int:
        return self._queue.num_running

    async def check(self, grammar: Grammar, tenant: str) -> None:
        """Raise `InvalidRequest` if `grammar` can't be compiled, within the limits of a check.

        Also `Overloaded`, where the tenant asks for more than its share, and `Unavailable`, where all do.
        """
        with self._changed:
            verdict = self._verdicts.find(grammar, self._clock())
            self.counts[KNOWN] += verdict is not None
        if verdict is None:
            verdict = await self._wait(*self._begin(grammar, tenant))
        if verdict.outcome is Outcome.LEFT:
            raise Unavailable("the router is stopping")
        if verdict.outcome is Outcome.FAILED:
            raise Unavailable(verdict.words)
        if verdict.outcome is not Outcome.PASSED:
            raise InvalidRequest(verdict.words, param=grammar.kind.value)

    def close(self) -> None:
        """End the processes. Whoever waits is answered."""
        with self._changed:
            self._is_closing = True
            for number in list(self._checks):
                self._leave(number)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    async def _wait(self, number: int, future: Future[Verdict]) -> Verdict:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._changed:
                self._leave(number)
            raise

    def _begin(self, grammar: Grammar, tenant: str) -> tuple[int, Future[Verdict]]:
        with self._changed:
            number = self._queue.offer(tenant, self._clock())
            if isinstance(number, Refused):
                self.counts[TURNED_AWAY] += 1
                raise _overload(number)
            check = self._checks[number] = _Check(grammar)
            self._start()
            self._changed.notify_all()
            return number, check.future

    def _start(self) -> None:
        """Before the first check: most routers are never asked for one."""
        if not self._threads:
            names = [f"grammars-{index}" for index in range(NUM_PROCESSES)]
            self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
            for thread in self._threads:
                thread.start()

    def _leave(self, number: int) -> None:
        """Nobody waits for a check any more."""
        check = self._checks.get(number)
        if check is None:
            return
        if check.checker is not None:
            check.checker.interrupt()
            return
        del self._checks[number]
        self._queue.drop(number)
        self._answer(check, Verdict(Outcome.LEFT))

    # in the threads

    def _serve(self) -> None:
        checker = self._open_checker()
        _start(checker)
        while (number := self._next(checker)) is not None:
            checked = _checked(checker, self._checks[number].grammar)
            with self._changed:
                self._finish(number, checked)
                self._changed.notify_all()
            _start(checker)
        checker.close()

    def _next(self, checker: Checker) -> int | None:
        """Wait for a check, and take it; None: there will be none."""
        with self._changed:
            while not self._is_closing:
                number = self._queue.pop()
                if number is None:
                    self._changed.wait()
                elif not self._is_known(number):
                    self._checks[number].checker = checker
                    checker.begin()
                    return number
            return None

    def _is_known(self, number: int) -> bool:
        """Whether the same grammar was checked meanwhile. It is answered."""
        verdict = self._verdicts.find(self._checks[number].grammar, self._clock())
        if verdict is not None:
            self._finish(number, Checked(verdict, 0.0), KNOWN)
        return verdict is not None

    def _finish(self, number: int, checked: Checked, counted: str = "") -> None:
        now_s, verdict = self._clock(), checked.verdict
        check = self._checks.pop(number)
        self._verdicts.add(check.grammar, verdict, now_s)
        turned_away, wait_s = self._queue.finish(number, checked.took_s, now_s)
        self._answer(check, verdict, counted)
        for waiting in turned_away:
            self.counts[TURNED_AWAY] += 1
            _set_exception(self._checks.pop(waiting).future, _overload(Refused(True, wait_s)))

    def _answer(self, check: _Check, verdict: Verdict, counted: str = "") -> None:
        self.counts[counted or verdict.outcome.value] += 1
        if check.future.set_running_or_notify_cancel():
            check.future.set_result(verdict)


def _start(checker: Checker) -> None:
    try:
        checker.start()
    except OSError as error:  # the next check tries again, and is told
        logger.error("a process that checks grammars does not start: %s", error)


def _checked(checker: Checker, grammar: Grammar) -> Checked:
    try:
        return checker.check(grammar)
    except Exception:  # of whatever sort: somebody waits for an answer
        logger.exception("checking a grammar failed")
        return Checked(Verdict(Outcome.FAILED, f"{grammar.kind.value} could not be checked: try again"), 0.0)


def _set_exception(future: Future[Verdict], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _overload(refused: Refused) -> Overloaded | Unavailable:
    retry_after_s = max(1, math.ceil(refused.retry_after_s))
    if refused.is_tenants:
        words = "too many of your schemas, patterns and grammars wait to be checked, or took too long: try again later"
        return Overloaded(words, retry_after_s=retry_after_s)
    words = "too many schemas, patterns and grammars wait to be checked: try again later"
    return Unavailable(words, retry_after_s=retry_after_s)
