"""Compiles grammars beside the scheduler's loop, so that the loop never waits for one.

One thread does it, tenants in turn; compiled grammars are kept, those used last. A grammar is checked first, in a
process with limits: what passes can be compiled here in bounded time and memory. What the masks of a tenant's outputs
took of everybody's steps is its debt: while that is too much, its grammars are refused. The answers are events, and a
descriptor is readable while there are some.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from diptych.common.errors import ConfigError, DiptychError, InternalError, InvalidRequest
from diptych.engine.values.events import CompileGrammar, GrammarFailed, GrammarReady
from diptych.generation.grammar import Grammar
from diptych.generation.output import FailureCode
from diptych.grammars.check_queue import CheckQueue, QueueLimits, Refused
from diptych.grammars.checker import Checker, Outcome, Verdicts

if TYPE_CHECKING:  # a library of which a process that compiles nothing needs nothing
    from diptych.grammars.compiler import Compiler
    from diptych.grammars.matcher import CompiledGrammar

logger = logging.getLogger(__name__)

CACHE_SIZE: Final = 64  # compiled grammars; usual ones take less than 100 KiB
STACK_BYTES: Final = 64 << 20  # far more than a check may use, as the compiler here does more than that
# A worker's open rooms are counted elsewhere, and checks cost no step. Masks do: three outputs that end for theirs.
LIMITS: Final = QueueLimits(2**62, 2**62, free_s=math.inf, max_debt_s=0.3, payback=0.1)

Answer = GrammarReady | GrammarFailed


class GrammarThread:
    """Owns the thread, its process, and the compiled grammars. All calls from the scheduler's thread."""

    def __init__(self, open_compiler: Callable[[], Compiler], clock: Callable[[], float] = time.monotonic) -> None:
        """Start `open_compiler` at once: reading a vocabulary takes a moment. It may raise `ConfigError`."""
        self._open_compiler = open_compiler
        self._clock = clock
        self._is_open = threading.Event()
        self._changed = threading.Condition()  # guards what follows
        self._rooms: set[int] = set()  # submitted and not dropped; the scheduler's thread alone uses it
        self._queue = CheckQueue(LIMITS)
        self._jobs: dict[int, CompileGrammar] = {}  # by number in the queue
        self._numbers: dict[int, int] = {}  # by room
        self._running_room: int | None = None
        self._is_closing = False
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()  # the thread's
        self._verdicts = Verdicts()  # the thread's
        self._checker = Checker()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)
        with _stacks_of(STACK_BYTES):
            self._thread.start()

    def wait_until_open(self) -> None:
        """Wait until the vocabulary is read, or can't be: much of that holds the interpreter's lock."""
        self._is_open.wait()

    def fileno(self) -> int:
        return self._wake

    def submit(self, effect: CompileGrammar) -> None:
        """Answer by one event that `poll` returns some time later, unless the room is dropped before."""
        self._rooms.add(effect.room)
        with self._changed:
            number = self._queue.offer(effect.tenant, self._clock())
            if isinstance(number, Refused):
                self._deliver(_refusal(effect.room, number))
                return
            self._jobs[number] = effect
            self._numbers[effect.room] = number
            self._changed.notify()

    def lend(self, tenant: str, seconds: float) -> bool:
        """The masks of an output of this tenant took so much more; return whether it may go on."""
        with self._changed:
            self._queue.charge(tenant, seconds, self._clock())
            return not self._queue.owes_too_much(tenant, self._clock())

    def drop(self, room: int) -> None:
        """Nobody waits for this room's grammar any more, if anybody did."""
        if room not in self._rooms:
            return
        self._rooms.remove(room)
        with self._changed:
            number = self._numbers.pop(room, None)
            if number is not None:
                del self._jobs[number]
                self._queue.drop(number)
            elif room == self._running_room:
                self._checker.interrupt()

    def poll(self) -> list[Answer]:
        """Return what was finished since the last call, without waiting."""
        answers = []
        while not self._answers.empty():
            os.eventfd_read(self._wake)
            answers.append(self._answers.get())
        return answers

    def close(self) -> None:
        """Wait for the compilation that runs, and drop those that wait."""
        with self._changed:
            self._is_closing = True
            self._checker.interrupt()
            self._changed.notify()
        self._thread.join()
        os.close(self._wake)

    # in the thread

    def _run(self) -> None:
        compiler = self._opened()
        self._is_open.set()
        while (number := self._next()) is not None:
            answer = self._work(self._jobs[number], compiler)
            with self._changed:
                self._running_room = None
                del self._jobs[number]
                turned_away, wait_s = self._queue.finish(number, 0.0, self._clock())
                for waiting in turned_away:
                    effect = self._jobs.pop(waiting)
                    del self._numbers[effect.room]
                    self._deliver(_refusal(effect.room, Refused(True, wait_s)))
            self._deliver(answer)
        self._checker.close()

    def _deliver(self, answer: Answer) -> None:
        os.eventfd_write(self._wake, 1)  # first: then the queue never holds more than the descriptor says
        self._answers.put(answer)

    def _opened(self) -> Compiler | Exception:
        try:
            return self._open_compiler()
        except Exception as error:  # each request hears of it
            if not isinstance(error, ConfigError):
                logger.exception("reading the vocabulary for grammars failed")
            return error

    def _next(self) -> int | None:
        """Wait for a job, and take it; None: there will be none."""
        with self._changed:
            while not self._is_closing:
                number = self._queue.pop()
                if number is None:
                    self._changed.wait()
                    continue
                self._running_room = self._jobs[number].room
                del self._numbers[self._running_room]
                self._checker.begin()
                return number
            return None

    def _work(self, effect: CompileGrammar, compiler: Compiler | Exception) -> Answer:
        try:
            if isinstance(compiler, Exception):
                raise compiler
            return self._answer(effect, compiler)
        except DiptychError as error:
            return GrammarFailed(effect.room, str(error))
        except BaseException as error:  # a bug, or a panic of the compiler; the request must be answered
            logger.exception("compiling a grammar failed")
            return GrammarFailed(effect.room, f"{type(error).__name__}: {error}")

    def _answer(self, effect: CompileGrammar, compiler: Compiler) -> Answer:
        matcher = self._compiled(effect.grammar, compiler).matcher(partial(self.lend, effect.tenant))
        matcher.accept(effect.prior_tokens)
        if matcher.error is not None:
            return GrammarFailed(effect.room, f"the output so far does not match the grammar: {matcher.error}")
        return GrammarReady(effect.room, matcher)

    def _compiled(self, grammar: Grammar, compiler: Compiler) -> CompiledGrammar:
        compiled = self._cache.get(grammar)
        if compiled is None or compiled.is_worn:
            compiled = self._cache[grammar] = compiler.compile(grammar, self._checked(grammar))
        self._cache.move_to_end(grammar)
        if len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return compiled

    def _checked(self, grammar: Grammar) -> str:
        """Return the source of a grammar that may be compiled here."""
        known = self._verdicts.find(grammar, time.monotonic())
        if known is not None and known.outcome is not Outcome.PASSED:
            raise InvalidRequest(known.words)
        checked = self._checker.check(grammar)
        self._verdicts.add(grammar, checked.verdict, time.monotonic())
        match checked.verdict.outcome:
            case Outcome.PASSED:
                return checked.source
            case Outcome.FAILED:
                raise InternalError(checked.verdict.words)
            case Outcome.LEFT:
                raise InvalidRequest("the request has ended")
            case _:
                raise InvalidRequest(checked.verdict.words)


def _refusal(room: int, refused: Refused) -> GrammarFailed:
    words = f"the masks of this tenant's grammars took too long: try again in {math.ceil(refused.retry_after_s)} s"
    return GrammarFailed(room, words, FailureCode.OVERLOADED)


@contextmanager
def _stacks_of(num_bytes: int) -> Iterator[None]:
    """Threads that begin meanwhile have stacks of this size."""
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)
