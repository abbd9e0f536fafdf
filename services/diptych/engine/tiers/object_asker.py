"""Asks a store which runs of a text are there, in threads of its own: nobody waits for it but who wants to.

Answers are heard by `answered`, in the thread that asks. A store that does not answer holds threads, and nothing else.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from diptych.engine.cache.page_ids import PageId
from diptych.engine.cache.tier import Lookup
from diptych.engine.tiers.runs import WIDTH, TextSearch, in_folders
from diptych.engine.tiers.stores.object_store import ObjectStore

NUM_ASKERS: Final = WIDTH
MOST_OPEN: Final = 64  # texts that are asked for at once; more are not asked for
JOIN_S: Final = 0.1  # that a thread gets to end
SHARE_KEPT: Final = 0.75  # of what was known of the time that an answer takes, when there is one more


@dataclass(slots=True)
class AskCounts:
    """Since start."""

    num_lookups: int = 0  # texts that were asked for
    num_runs: int = 0  # that were found
    num_failed: int = 0  # texts of which a question failed


@dataclass(frozen=True, slots=True)
class Asked:
    """A text of which it is asked what is there."""

    runs: Sequence[str]  # names of objects
    first: int  # number in the text of the first page
    ids: Sequence[PageId]  # of the pages of these runs from there on
    before: Sequence[PageId] = ()  # and of some before it, which ends have, too
    ends: Mapping[int, str] = field(default_factory=dict)  # names of other objects, behind these runs

    def name(self, number: int) -> str:
        """Return the name of an object: see `TextSearch`."""
        return self.runs[number] if number < len(self.runs) else self.ends[number - len(self.runs)]


@dataclass(slots=True, eq=False)
class Question:
    """What is asked of one text, and what is known of it."""

    asked: Asked
    lookup: Lookup
    search: TextSearch
    begun_s: float
    took_s: float = 0.0  # until the last answer came, whoever hears of it when
    error: str = ""
    is_void: bool = False  # nobody believes the answer: meanwhile something was to be forgotten
    num_open: int = 0  # objects whose answers are out
    answers: list[tuple[int, bool]] = field(default_factory=list)


class ObjectAsker:
    """One thread asks, and hears answers. `close` it."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float], other_folders: Sequence[str] = ()) -> None:
        """`other_folders`: where the objects must be, too, beside the one that is in their names."""
        self._other_folders = other_folders
        self.counts = AskCounts()
        self.usual_s = 0.0  # of an answer
        self._store = store
        self._clock = clock
        self._open: dict[Question, None] = {}  # in the order in which they were asked
        self._todo: SimpleQueue[tuple[Question, int] | None] = SimpleQueue()
        self._done: deque[Question] = deque()
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = [threading.Thread(target=self._run, name="tier-asker", daemon=True) for _ in range(NUM_ASKERS)]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """Readable while `answered` has something."""
        return self._wake

    @property
    def is_busy(self) -> bool:
        """Whether more questions would only wait: as when the store does not answer."""
        return len(self._open) >= MOST_OPEN

    @property
    def waits_since_s(self) -> float:
        """When the oldest question was asked that is not answered; infinity: all are."""
        return next(iter(self._open)).begun_s if self._open else math.inf

    def ask(self, asked: Asked, until_s: float) -> Lookup:
        search = TextSearch(len(asked.runs), [*asked.ends])
        question = Question(asked, Lookup(until_s), search, self._clock())
        self.counts.num_lookups += 1
        self._open[question] = None
        with self._lock:
            self._ask_more(question)
        return question.lookup

    def answered(self) -> Sequence[Question]:
        """Return what was answered since the last call; whoever waits for them may go on then."""
        with self._lock:  # so that the counter is that of what is done
            if not self._done:
                return ()
            os.eventfd_read(self._wake)
            done, self._done = [*self._done], deque()
        for question in done:
            del self._open[question]
            self.counts.num_failed += bool(question.error)
            self.counts.num_runs += question.search.num_found
            self.usual_s = SHARE_KEPT * (self.usual_s or question.took_s) + (1 - SHARE_KEPT) * question.took_s
            question.lookup.is_answered = True
        return done

    def void(self) -> None:
        """What is asked now may be answered by what goes: whoever waits for it hears nothing but that it is over."""
        for question in self._open:
            question.is_void = True

    def measured(self, took_s: float) -> None:
        """An answer that nobody waited for took so long: that counts in place of all before."""
        self.usual_s = took_s

    def close(self) -> None:
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._wake)

    def _ask_more(self, question: Question) -> None:
        wave = question.search.to_ask()
        question.num_open = len(wave)
        for run in wave:
            self._todo.put((question, run))

    # threads

    def _run(self) -> None:
        while (asked := self._todo.get()) is not None:
            question, run = asked
            is_there, error = self._is_there(question, run)
            with self._lock:
                question.error = question.error or error
                question.answers.append((run, is_there))
                question.num_open -= 1
                if question.num_open == 0:
                    self._end_wave(question)

    def _is_there(self, question: Question, run: int) -> tuple[bool, str]:
        if question.error:
            return False, ""
        try:
            names = in_folders(question.asked.name(run), self._other_folders)
            return all(self._store.size(name) is not None for name in names), ""
        except OSError as error:
            return False, str(error)

    def _end_wave(self, question: Question) -> None:
        """Ask on, or have it heard. Whoever calls has the lock."""
        question.search.tell(question.answers)
        question.answers.clear()
        if question.search.is_over or question.error:
            question.took_s = self._clock() - question.begun_s
            self._done.append(question)
            os.eventfd_write(self._wake, 1)
        else:
            self._ask_more(question)
