"""Reads pages of a medium into the KV pool, in threads of its own, and verifies each before anybody sees it.

What the system has in memory is read straight into the pages, as that cannot wait. Anything else comes by way of a
buffer, bit by bit, and is copied only while the load is still wanted: the pages are written no more once a load is
answered. So a medium that hangs holds a thread and a buffer, and nothing else. A load is answered when all its pages
are there, when one is not what it should be, when a read fails or takes too long, or when it takes far longer than was
expected.

How long loads take is learned from those that the medium itself answered. A medium of which nothing is known is
measured first, by a read that nobody waits for.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diptych.engine.schedule.pace.step_times import StepLine
from diptych.engine.tiers.breaker import Breaker
from diptych.engine.tiers.page_format import PageFormat
from diptych.engine.tiers.record_bytes import Landing
from diptych.engine.tiers.records import RecordReader, Run, Source
from diptych.engine.values.events import PagesRestored

logger = logging.getLogger(__name__)

RUN_PAGES: Final = 256  # that a thread reads one behind the other, at most
LATE: Final = 4.0  # times as long as expected, beside one read that hangs: then a load is given up
MEASURED_AGE_S: Final = 30.0  # after which the medium is measured again, where somebody asks
GONE: Final = "some pages are gone"
JOIN_S: Final = 2.0  # that a thread gets to end


@dataclass(slots=True)
class ReadCounts:
    """Since start."""

    num_pages: int = 0
    nbytes: int = 0  # with headers
    num_corrupt: int = 0  # pages that were not what they should be; must be 0
    num_failed: int = 0  # loads whose read failed, hung or was late


@dataclass(slots=True, eq=False)
class _Load:
    number: int
    num_left: int  # runs
    nbytes: int  # with what waited before it
    begun_s: float
    until_s: float
    error: str = ""
    num_writing: int = 0  # threads that write into its pages now
    num_cached: int = 0  # runs that were in memory
    is_answered: bool = False


class _Reader:
    """What a thread reads with, and since when it waits for the medium."""

    def __init__(self, records: RecordReader, landing: Landing, hangs_s: float) -> None:
        self.records = records
        self.landing = landing
        self._hangs_s = hangs_s
        self.since_s: float | None = None
        self.load: _Load | None = None  # for which; None: to measure

    def hangs(self, now_s: float) -> bool:
        since_s = self.since_s
        return since_s is not None and now_s - since_s > self._hangs_s

    @contextlib.contextmanager
    def asking(self, load: _Load | None, now_s: float) -> Iterator[None]:
        """Let others see that this thread waits for the medium meanwhile."""
        self.load, self.since_s = load, now_s
        try:
            yield
        finally:
            self.since_s = None


class PageReader:
    """One thread asks, and is answered by `restored`. `close` it before the pool goes."""

    def __init__(
        self,
        source: Source,
        record: PageFormat,
        pool: Any,
        clock: Callable[[], float],
        *,
        num_readers: int,
        hangs_s: float,
    ) -> None:
        """`pool`: bytes `[num_pages, page_nbytes]`, to be written. `hangs_s`: after which a read counts as hanging."""
        self.counts = ReadCounts()
        self.breaker = Breaker()
        self._source = source
        self._clock = clock
        self._hangs_s = hangs_s
        self._size = record.record_nbytes
        self._line = StepLine()  # seconds of a load, by its bytes with those that wait before it
        self._measured_s = -math.inf  # when the medium was last asked to be measured
        self._waiting: deque[tuple[_Load | None, Run]] = deque()
        self._waiting_nbytes = 0
        self._open: dict[int, _Load] = {}
        self._answers: deque[PagesRestored] = deque()
        self._is_closing = False
        self._changed = threading.Condition()
        self._wake_receive, self._wake_send = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._readers = [_Reader(source.new_reader(), Landing(record, pool), hangs_s) for _ in range(num_readers)]
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name="tier-reader", daemon=True) for each in self._readers
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """Readable while `restored` has something."""
        return self._wake_receive

    @property
    def is_asked(self) -> bool:
        """Whether the medium is asked now: it has not failed of late, and somebody is there to read."""
        now_s = self._clock()
        return self.breaker.allows(now_s) and not all(reader.hangs(now_s) for reader in self._readers)

    @property
    def is_measured(self) -> bool:
        """Whether it is known how long loads take."""
        return self._line.is_known

    def note_corrupt(self, num_pages: int) -> None:
        """Somebody else has found pages that are not what they should be."""
        with self._changed:
            self.counts.num_corrupt += num_pages

    def begin(self) -> None:
        """The medium is asked something else than to read; `end` when that is over."""
        with self._changed:
            self.breaker.begin(self._clock())

    def end(self, error: str) -> None:
        """What was asked is answered, or has failed."""
        with self._changed:
            if not error:
                self.breaker.succeed()
            elif self.breaker.fail(self._clock()):
                logger.warning("%s has failed: %s", self._source.name, error)

    def load_s(self, num_pages: int) -> float:
        """Predict how long it takes to load so many pages, with what waits; infinity: not known, or not now."""
        if not self.is_asked:
            return math.inf
        self.measure()
        return self._line.at(self._waiting_nbytes + num_pages * self._size) if self._line.is_known else math.inf

    def measure(self) -> None:
        """Have the medium measured, unless that was of late."""
        now_s = self._clock()
        where = self._source.to_measure()
        if where is None or now_s - self._measured_s < MEASURED_AGE_S:
            return
        self._measured_s = now_s
        with self._changed:
            self._waiting.append((None, Run(where, 0, [], [])))
            self._changed.notify()

    def load(self, number: int, runs: Sequence[Run], is_whole: bool) -> None:
        """Bring pages into the pool. `is_whole`: False where the medium has lost some of them: there is no use."""
        now_s = self._clock()
        self.breaker.begin(now_s)
        with self._changed:
            nbytes = self._waiting_nbytes + sum(map(self._nbytes, runs))
            until_s = now_s + self._hangs_s + LATE * self._line.at(nbytes)
            load = self._open[number] = _Load(number, len(runs), nbytes, now_s, until_s)
            if is_whole:
                self._waiting.extend((load, run) for run in runs)
                self._waiting_nbytes = nbytes
                self._changed.notify(len(runs))
            else:
                load.error = GONE
                self._answer(load)

    def restored(self) -> Sequence[PagesRestored]:
        """Return what has ended since the last call, without waiting; give up what takes too long."""
        if not self._open and not self._answers:
            return ()
        with self._changed:
            self._give_up(self._clock())
            answers, self._answers = [*self._answers], deque()
            if answers:
                os.read(self._wake_receive, 4096)
        return answers

    def close(self) -> None:
        """Return when no thread writes into the pool any more, nor will. A second call does nothing.

        Whoever writes does not wait for the medium meanwhile, so that is soon; there is a bound in any case.
        """
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._waiting.clear()
            self._waiting_nbytes = 0
            for load in self._open.values():
                load.error = load.error or "the worker ends"
            self._changed.notify_all()
            is_quiet = self._changed.wait_for(self._is_quiet, JOIN_S)
        if not is_quiet:
            logger.error("a thread still copies pages from %s into the pool after %g s", self._source.name, JOIN_S)
        for thread in self._threads:
            thread.join(JOIN_S)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._wake_receive)
            os.close(self._wake_send)

    def _is_quiet(self) -> bool:
        return not any(load.num_writing for load in self._open.values())

    def _nbytes(self, run: Run) -> int:
        return len(run.pages) * self._size

    def _give_up(self, now_s: float) -> None:
        hanging = [reader for reader in self._readers if reader.hangs(now_s)]
        for reader in hanging:
            if reader.load is not None:
                self._fail(reader.load, f"a read has not ended within {self._hangs_s:g} s")
        for load in [*self._open.values()]:
            if len(hanging) == len(self._readers):
                self._fail(load, f"no read ends within {self._hangs_s:g} s")
            elif now_s > load.until_s:
                self._line.learn(load.nbytes, now_s - load.begun_s)
                self._fail(load, "it takes far longer than expected")

    def _fail(self, load: _Load, error: str) -> None:
        """The medium has failed a load."""
        if not load.error and not load.is_answered:
            self.counts.num_failed += 1
            self.breaker.fail(self._clock())
        self._end(load, error)

    def _end(self, load: _Load, error: str) -> None:
        """A load is given up; it is answered once nobody writes into its pages."""
        if not load.error and not load.is_answered:
            load.error = error
            logger.warning("pages are not loaded from %s: %s", self._source.name, error)
        self._answer(load)

    def _answer(self, load: _Load) -> None:
        """Answer a load if it has ended."""
        if load.is_answered or load.num_writing or (load.num_left and not load.error):
            return
        load.is_answered = True
        del self._open[load.number]
        if not load.error:
            self.breaker.succeed()
            if not load.num_cached:
                self._line.learn(load.nbytes, self._clock() - load.begun_s)
        self._answers.append(PagesRestored(load.number, load.error or None))
        os.write(self._wake_send, b"\0")

    # threads

    def _run(self, reader: _Reader) -> None:
        while (asked := self._next(reader)) is not None:
            load, run = asked
            if load is None:
                self._measure(reader, run)
                continue
            try:
                self._read(reader, load, run)
            except FileNotFoundError:
                self._source.miss(run)
                with self._changed:
                    self._end(load, GONE)
            except OSError as error:
                with self._changed:
                    self._fail(load, str(error))
        reader.records.rest()

    def _next(self, reader: _Reader) -> tuple[_Load | None, Run] | None:
        if not self._waiting:
            reader.records.rest()  # without the lock, as that may hang
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            asked = self._waiting.popleft()
            self._waiting_nbytes -= self._nbytes(asked[1])
            return asked

    def _measure(self, reader: _Reader, run: Run) -> None:
        """Take the time of one read that is not in the page cache."""
        try:
            with reader.asking(None, self._clock()):
                num_read, took_s = reader.records.measure(run.where)
        except FileNotFoundError:
            num_read, took_s = 0, 0.0
        except OSError as error:
            self.breaker.fail(self._clock())
            logger.warning("%s can't be read: %s", run.where, error)
            return
        with self._changed:
            if num_read:
                self._line.learn(num_read, took_s)
            else:
                self._measured_s = -math.inf  # there was nothing yet

    def _read(self, reader: _Reader, load: _Load, run: Run) -> None:
        if load.error:  # nobody wants it any more
            return
        reader.landing.begin(run.ids, run.pages)
        with reader.asking(load, self._clock()):
            reader.records.prepare(run)
        is_cached = True
        while self._take_cached(reader, load, run):
            is_cached = False
            if not self._take_from_medium(reader, load, run):
                break
        if not load.error:
            self._count(load, run, is_cached, self._lose(run, reader.landing.unsound()))

    def _take_cached(self, reader: _Reader, load: _Load, run: Run) -> bool:
        """Take what is in memory, straight into the pool; return whether more is wanted."""
        if not self._begin_writing(load):
            return False
        try:
            reader.records.read_cached(run, reader.landing)
            return reader.landing.num_left > 0
        finally:
            self._end_writing(load)

    def _take_from_medium(self, reader: _Reader, load: _Load, run: Run) -> bool:
        """Take what the medium gives next; False: it gives nothing, or nobody wants it any more."""
        landing = reader.landing
        with reader.asking(load, self._clock()):
            data = reader.records.read(run, landing.num_taken, landing.num_left)
        if not memoryview(data).nbytes or not self._begin_writing(load):
            return False
        try:
            landing.take(data)
            return landing.num_left > 0
        finally:
            self._end_writing(load)

    def _lose(self, run: Run, unsound: Sequence[int]) -> int:
        """Let nobody find the pages of a run that are not what they should be; return how many that are."""
        for number in unsound:
            self._source.lose(run, run.ids[number])
        return len(unsound)

    def _count(self, load: _Load, run: Run, num_cached: int, num_bad: int) -> None:
        """A run was read; its pages are in the pool, unless some are bad, or nobody wants them any more."""
        with self._changed:
            load.num_left -= 1
            load.num_cached += num_cached
            self.counts.nbytes += self._nbytes(run)
            self.counts.num_corrupt += num_bad
            if num_bad:
                self._end(load, f"{run.where} does not have what was written behind byte {run.offset}")
            elif not load.error:
                self.counts.num_pages += len(run.pages)
                self._answer(load)

    def _begin_writing(self, load: _Load) -> bool:
        with self._changed:
            if load.error or load.is_answered:
                return False
            load.num_writing += 1
            return True

    def _end_writing(self, load: _Load) -> None:
        with self._changed:
            load.num_writing -= 1
            if load.error:
                self._answer(load)
            if self._is_closing:  # else only readers wait, for something to read
                self._changed.notify_all()
