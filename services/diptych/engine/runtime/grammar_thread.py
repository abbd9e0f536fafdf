"""Compiles grammars beside the scheduler's loop, so that the loop never waits for one.

One thread does it, in the order asked for; compiled grammars are kept, those used last. The answers are events, and a
descriptor is readable while there are some.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Final

from diptych.common.errors import ConfigError, InvalidRequest
from diptych.engine.events import CompileGrammar, GrammarFailed, GrammarReady
from diptych.engine.grammar.compiler import Compiler
from diptych.engine.grammar.grammar import Grammar
from diptych.engine.grammar.matcher import CompiledGrammar

logger = logging.getLogger(__name__)

CACHE_SIZE: Final = 64  # compiled grammars; usual ones take less than 100 KiB

Answer = GrammarReady | GrammarFailed


class GrammarThread:
    """Owns the thread and the compiled grammars. All calls from the scheduler's thread."""

    def __init__(self, open_compiler: Callable[[], Compiler]) -> None:
        """Start `open_compiler` at once: reading a vocabulary takes a moment. It may raise `ConfigError`."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiler: Future[Compiler] = self._pool.submit(open_compiler)
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()  # the thread's
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    def wait_until_open(self) -> None:
        """Wait until the vocabulary is read, or can't be: much of that holds the interpreter's lock."""
        wait([self._compiler])

    def fileno(self) -> int:
        return self._wake

    def submit(self, effect: CompileGrammar) -> None:
        """Answer by one event that `poll` returns some time later."""
        self._pool.submit(self._work, effect)

    def poll(self) -> list[Answer]:
        """Return what was finished since the last call, without waiting."""
        answers = []
        while not self._answers.empty():
            os.eventfd_read(self._wake)
            answers.append(self._answers.get())
        return answers

    def close(self) -> None:
        """Wait for the compilation that runs, and drop those that wait."""
        self._pool.shutdown(cancel_futures=True)
        os.close(self._wake)

    # in the thread

    def _work(self, effect: CompileGrammar) -> None:
        try:
            answer = self._answer(effect)
        except Exception as error:  # a bug, but the request must be answered
            logger.exception("compiling a grammar failed")
            answer = GrammarFailed(effect.room, f"{type(error).__name__}: {error}")
        os.eventfd_write(self._wake, 1)  # first: then the queue never holds more than the descriptor says
        self._answers.put(answer)

    def _answer(self, effect: CompileGrammar) -> Answer:
        try:
            matcher = self._compiled(effect.grammar).matcher()
        except (ConfigError, InvalidRequest) as error:
            return GrammarFailed(effect.room, str(error))
        matcher.accept(effect.prior_tokens)
        if matcher.error is not None:
            return GrammarFailed(effect.room, f"the output so far does not match the grammar: {matcher.error}")
        return GrammarReady(effect.room, matcher)

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        compiled = self._cache.get(grammar)
        if compiled is None or compiled.is_worn:
            compiled = self._cache[grammar] = self._compiler.result().compile(grammar)
        self._cache.move_to_end(grammar)
        if len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return compiled
