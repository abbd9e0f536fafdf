"""Finds batches that are to be done, claims them, and does them: one of each tenant at a time.

A batch that a process holds is nobody else's until that process has been silent for `lease_s`, or leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from diptych.router.batches.job import Claimed
from diptych.router.batches.log import OPEN, JobLog, Place, find_spec
from diptych.router.batches.work import Bench, JobWork, LostHold

logger = logging.getLogger(__name__)

MAX_BATCHES: Final = 8  # at once
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
        self._news = asyncio.Event()
        self._is_leaving = False

    @property
    def num_working(self) -> int:
        return len(self._working)

    def poke(self) -> None:
        """Something has become of a batch: look now."""
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
            marks = sorted(await self._bench.store.names(OPEN), key=_age)
            self._logs = {mark: log for mark, log in self._logs.items() if mark in marks}
            for mark in marks:
                if mark not in self._working and len(self._working) < MAX_BATCHES and not self._has_turn(mark):
                    await self._try(mark)
        except OSError as error:
            logger.warning("can't look for batches: %s", error)

    def _has_turn(self, mark: str) -> bool:
        """Whether a batch of the same tenant runs here."""
        tenant = mark.partition(".")[0]
        return any(each.partition(".")[0] == tenant for each in self._working)

    async def _try(self, mark: str) -> None:
        """Begin with a batch if nobody else holds it."""
        log = await self._log(mark)
        if log is None:
            return
        await log.read_on()
        now_s = self._bench.clock()
        if log.job.is_over:  # who ended it had no time to say so
            await self._bench.store.delete(log.place.mark)
        elif self._may_claim(log, now_s) and await log.append(Claimed(now_s + self._bench.lease_s), now_s):
            self._begin(mark, log)

    def _may_claim(self, log: JobLog, now_s: float) -> bool:
        return log.job.holder == self._name or log.job.is_free(now_s)

    async def _log(self, mark: str) -> JobLog | None:
        if mark not in self._logs:
            spec = await find_spec(self._bench.store, Place.marked(mark))
            if spec is None:  # it is about to be there
                return None
            self._logs[mark] = JobLog(self._bench.store, spec, self._name)
        return self._logs[mark]

    def _begin(self, mark: str, log: JobLog) -> None:
        work = JobWork(log, self._bench)
        self._working[mark] = work, asyncio.create_task(self._work(mark, work))

    async def _work(self, mark: str, work: JobWork) -> None:
        batch_id = work.job.spec.batch_id
        logger.info("batch %s: going on after %d of %d", batch_id, work.job.num_done, work.job.total)
        try:
            await work.run()
            logger.info("batch %s is over: %s", batch_id, work.job.status)
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


def _age(mark: str) -> str:
    """Ids that were made later come later."""
    return mark.partition(".")[2]
