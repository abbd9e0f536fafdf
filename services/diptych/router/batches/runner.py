"""Finds batches that are to be done, claims them, and does them: the lines of one of each tenant at a time.

A batch that a process holds is nobody else's until that process has been silent for `lease_s`, or leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from diptych.router.batches.bench import Bench
from diptych.router.batches.finish import tidy
from diptych.router.batches.held import LostHold
from diptych.router.batches.job import Claimed, Step
from diptych.router.batches.log import OPEN, JobLog, Place, find_spec
from diptych.router.batches.work import JobWork

logger = logging.getLogger(__name__)

MAX_BATCHES: Final = 8  # whose lines run, at once
MAX_CHORES: Final = 8  # that are validated or closed beside them
QUEUE_LOOKS: Final = 6  # looks for batches, of which one also looks at those that can't run their lines yet
PATIENCE_S: Final = 60.0  # with a batch of which nothing comes, while those of others wait
ORPHAN_S: Final = 600.0  # for which a mark may lack its batch
LEAVE_S: Final = 5.0  # to say that others may go on


class BatchRunner:
    """Runs batches on the event loop of a router's process."""

    def __init__(self, bench: Bench, name: str, look_s: float) -> None:
        """`name`: of this process, while it runs; no other one ever has it. `look_s`: between two looks for batches."""
        self._bench = bench
        self._name = name
        self._look_s = look_s
        self._logs: dict[str, JobLog] = {}  # of the batches that are not over, by mark
        self._working: dict[str, tuple[JobWork, asyncio.Task[None]]] = {}  # by mark
        self._places: set[str] = set()  # marks of those whose lines run
        self._gave_way_s: dict[str, float] = {}  # when, by tenant
        self._next_look_s: dict[str, float] = {}  # by mark; on the monotonic clock, as all times here
        self._orphans: dict[str, float] = {}  # since when they are seen
        self._news = asyncio.Event()
        self._is_leaving = False

    @property
    def num_working(self) -> int:
        return len(self._working)

    def poke(self) -> None:
        """Something has become of a batch: look now."""
        self._next_look_s.clear()
        self._news.set()
        for work, _ in self._working.values():
            work.poke()

    async def run(self) -> None:
        """Run until it is cancelled, or has left."""
        try:
            while not self._is_leaving:
                await self._look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._look_s * self._bench.rng.uniform(0.7, 1.3)):
                        await self._news.wait()
                self._news.clear()
        finally:
            await self._stop()

    def leave(self) -> None:
        """Stop: what runs is done by other processes."""
        self._is_leaving = True
        self._news.set()

    async def _look(self) -> None:
        try:
            marks = sorted(await self._bench.store.names(OPEN), key=self._rank)
            self._forget_others(set(marks))
            self._make_room(marks)
        except Exception as error:
            return _warn("can't look for batches", error)
        for mark in marks:
            if mark not in self._working and self._bench.monotonic() >= self._next_look_s.get(mark, 0.0):
                await self._look_at(mark)

    async def _look_at(self, mark: str) -> None:
        """Whatever is wrong with it is nobody else's trouble."""
        try:
            await self._try(mark)
        except Exception as error:
            _warn(f"batch {mark} waits", error)
            self._next_look_s[mark] = self._bench.monotonic() + self._bench.lease_s

    def _rank(self, mark: str) -> tuple[float, str]:
        """First come those whose tenants have not given way, or did so long ago; of these, the oldest."""
        return self._gave_way_s.get(_tenant(mark), 0.0), _age(mark)

    def _forget_others(self, marks: set[str]) -> None:
        self._logs = {mark: log for mark, log in self._logs.items() if mark in marks}
        self._orphans = {mark: since_s for mark, since_s in self._orphans.items() if mark in marks}
        tenants = {_tenant(mark) for mark in marks}
        self._gave_way_s = {tenant: at_s for tenant, at_s in self._gave_way_s.items() if tenant in tenants}

    def _make_room(self, marks: Sequence[str]) -> None:
        """Take the place of a batch of which nothing comes, if another tenant has none."""
        running = {_tenant(mark) for mark in self._places}
        if len(self._places) < MAX_BATCHES or all(_tenant(mark) in running for mark in marks):
            return
        mark = max(self._places, key=lambda each: self._working[each][0].stuck_s)
        work, _ = self._working[mark]
        if work.stuck_s >= PATIENCE_S:
            self._gave_way_s[_tenant(mark)] = self._bench.monotonic()
            work.give_way()

    def _may_run(self, mark: str) -> bool:
        """Whether there is a place for its lines."""
        running = {_tenant(each) for each in self._places}
        return mark in self._places or (len(running) < MAX_BATCHES and _tenant(mark) not in running)

    def _take_place(self, mark: str) -> bool:
        if self._may_run(mark):
            self._places.add(mark)
            return True
        return False

    async def _try(self, mark: str) -> None:
        """Begin with a batch if nobody else holds it. What is no work of workers needs no place."""
        log = await self._log(mark)
        if log is None:
            return
        await log.read_on()
        now_s = self._bench.clock()
        if log.job.is_over:  # who ended it had no time to say so
            await tidy(self._bench.store, log.place)
        elif not self._may_begin(mark, log.job.next_step(now_s)):
            wait_s = min(QUEUE_LOOKS * self._look_s, max(0.0, log.job.spec.expires_s - now_s))
            self._next_look_s[mark] = self._bench.monotonic() + wait_s
        elif self._may_claim(log, now_s) and await log.append(Claimed(now_s + self._bench.lease_s), now_s):
            self._begin(mark, log)

    def _may_begin(self, mark: str, step: Step) -> bool:
        if step is Step.RUN:
            return self._may_run(mark)
        return len(self._working) - len(self._places) < MAX_CHORES

    def _may_claim(self, log: JobLog, now_s: float) -> bool:
        return log.job.holder == self._name or log.job.is_free(now_s)

    async def _log(self, mark: str) -> JobLog | None:
        if mark not in self._logs:
            spec = await find_spec(self._bench.store, Place.marked(mark))
            if spec is None:  # it is about to be there, or who made it died
                await self._look_at_orphan(mark)
                return None
            self._logs[mark] = JobLog(self._bench.store, spec, self._name)
        return self._logs[mark]

    async def _look_at_orphan(self, mark: str) -> None:
        now_s = self._bench.monotonic()
        if now_s - self._orphans.setdefault(mark, now_s) >= ORPHAN_S:
            await self._bench.store.delete(f"{OPEN}/{mark}")

    def _begin(self, mark: str, log: JobLog) -> None:
        work = JobWork(log, self._bench)
        if log.job.next_step(self._bench.clock()) is Step.RUN:
            self._places.add(mark)
        self._working[mark] = work, asyncio.create_task(self._work(mark, work))

    async def _work(self, mark: str, work: JobWork) -> None:
        batch_id = work.job.spec.batch_id
        logger.info("batch %s: going on after %d of %d", batch_id, work.job.num_done, work.job.total)
        try:
            await work.run(lambda: self._take_place(mark))
            logger.info("batch %s is left: %s", batch_id, work.job.status)
        except LostHold as error:
            logger.warning("batch %s", error)
        except OSError as error:
            logger.warning("batch %s waits for its store: %s", batch_id, error)
            await asyncio.sleep(self._look_s)
        except Exception:
            logger.exception("batch %s stopped", batch_id)
            await asyncio.sleep(self._bench.lease_s)
        finally:
            if not self._is_leaving:
                del self._working[mark]
                self._places.discard(mark)
                self._next_look_s.clear()
                self._news.set()

    async def _stop(self) -> None:
        self._is_leaving = True
        works = list(self._working.values())
        for _, task in works:
            task.cancel()
        await asyncio.gather(*(task for _, task in works), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await asyncio.gather(
                    *(work.leave() for work, _ in works if not work.job.is_over), return_exceptions=True
                )


def _warn(what: str, error: Exception) -> None:
    """Errors of a store say all in their words."""
    logger.warning("%s: %s", what, error, exc_info=None if isinstance(error, OSError) else error)


def _tenant(mark: str) -> str:
    return mark.partition(".")[0]


def _age(mark: str) -> str:
    """Ids that were made later come later."""
    return mark.partition(".")[2]
