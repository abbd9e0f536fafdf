"""Does what is left of a batch, for as long as this process holds it.

Rule: a line's result counts once the log names it. What was not named is run again by whoever holds the batch next;
what was named never is. So whatever dies at whatever moment, each line has one result.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

import orjson

from diptych.common.errors import Overloaded, Unavailable
from diptych.router.batches.bench import Bench, LineCall
from diptych.router.batches.files import new_id
from diptych.router.batches.finish import ResultFiles, tidy
from diptych.router.batches.held import HeldBatch, LostHold, LostInput
from diptych.router.batches.job import Claimed, Closed, Ending, Job, Problem, Refused, Results, Step, Validated
from diptych.router.batches.lanes import Lane, Lanes
from diptych.router.batches.lines import Call, LineError, Validation
from diptych.router.batches.log import JobLog
from diptych.router.batches.results import Reply, Row, request_id, row_of
from diptych.router.batches.store import Unreadable

logger = logging.getLogger(__name__)

FLUSH_BYTES: Final = 4 << 20  # of results, that are written before that time
MAX_FLUSH_S: Final = 10.0  # between two writes of results, of a batch that has run for ten minutes
MAX_PAUSE_S: Final = 30.0  # before a line is tried again that was refused
NUM_TRIES: Final = 3  # of a line that fails by no fault of its own
FIRST_FAULT: Final = 500  # status of such a failure, or a higher one
FAULT: Final = Reply(500, orjson.dumps({"error": {"message": "the router failed", "code": "internal_error"}}))


class JobWork:
    """The work on one batch that was claimed."""

    def __init__(self, log: JobLog, bench: Bench) -> None:
        self._held = HeldBatch(log, bench)
        self._bench = bench
        self._rows: list[Row] = []  # results that the log does not name yet
        self._num_bytes = 0  # of these
        self._begun_s = self._flushed_s = bench.monotonic()
        self._refused_s: float | None = None  # since then all lines were, which were tried
        self._num_serving = 0  # lines
        self._gives_way = False
        self._begun: set[int] = set()  # lines
        self._news = asyncio.Event()
        self._can_write = asyncio.Event()
        self._can_write.set()

    @property
    def job(self) -> Job:
        return self._held.job

    def poke(self) -> None:
        """Look at the log now: somebody has cancelled the batch."""
        self._news.set()

    @property
    def stuck_s(self) -> float:
        """For how long nothing has come of it, as all of its lines are refused for now."""
        is_stuck = self._refused_s is not None and not self._num_serving
        return self._bench.monotonic() - (self._refused_s or 0.0) if is_stuck else 0.0

    def give_way(self) -> None:
        """Have others run their lines, and run its own when there is a place again."""
        self._gives_way = True
        self._news.set()

    async def run(self, may_run: Callable[[], bool] = lambda: True) -> None:
        """Return when the batch is over, or has lines that may not run now: then anybody may claim it.

        Raises `LostHold`, and `OSError` where the store fails.
        """
        steps: Mapping[Step, Callable[[], Awaitable[None]]] = {
            Step.VALIDATE: self._validate,
            Step.RUN: self._run_lines,
            Step.CLOSE: self._close,
            Step.FINISH: ResultFiles(self._held, self._bench).write,
        }
        while (step := self.job.next_step(self._bench.clock())) is not Step.NOTHING:
            if step is Step.RUN and (self._gives_way or not may_run()):
                return await self.leave()
            await steps[step]()
        await tidy(self._bench.store, self._held.log.place)

    async def leave(self) -> None:
        """Have another process take it at once, with the results that there are."""
        if self.job.closed is None:
            await self._flush()
        await self._held.append(Claimed(0.0))

    # the steps

    async def _validate(self) -> None:
        validation = Validation(self.job.spec.endpoint, self._bench.max_line_bytes)
        try:
            async with aclosing(self._held.lines()) as lines:
                async for line in lines:
                    validation.check(line)
                    if validation.is_hopeless:
                        break
        except LostInput as error:
            validation.problems.append(_lost(error))
        else:
            validation.end()
        problems = validation.problems
        await self._held.append(Refused(problems) if problems else Validated(validation.total))

    async def _run_lines(self) -> None:
        """Run lines until all are, or none is to be run any more."""
        self._begun.clear()
        feeding = asyncio.ensure_future(self._feed())
        try:
            while not feeding.done() and not self._gives_way and self._next_step is Step.RUN:
                await self._wait_for_news(feeding)
                await self._tick()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        await self._flush_patiently()
        if not feeding.cancelled():
            await self._end_feeding(feeding.exception())

    async def _flush_patiently(self) -> None:
        """All lines have ended, and their results are kept while the store fails; until the window ends."""
        while self._rows and self._next_step is Step.RUN:
            self._flushed_s = -math.inf
            await self._tick()
            if self._rows:
                await asyncio.sleep(self._bench.tick_s)
        await self._flush()

    @property
    def _next_step(self) -> Step:
        return self.job.next_step(self._bench.clock())

    async def _tick(self) -> None:
        """Hear what is new, and say what is. While the store fails no line begins, and results are kept."""
        try:
            await self._held.log.read_on()
            if self._is_flush_due() or not self._can_write.is_set():
                await self._flush()
            if not self._can_write.is_set():  # see whether it can
                await self._held.append(Claimed(self._bench.clock() + self._bench.lease_s))
            await self._held.renew()
        except Unreadable:
            raise
        except OSError as error:
            if self._can_write.is_set():
                logger.warning("batch %s begins no line until its store can be written: %s", self._held.id, error)
            self._can_write.clear()
        else:
            self._can_write.set()

    async def _end_feeding(self, error: BaseException | None) -> None:
        """All lines that were begun have ended."""
        if isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if error is None and self._next_step is Step.RUN:
            error = LostInput(f"the file {self.job.spec.input_file_id} has fewer lines than it had")
        if isinstance(error, LostInput):
            await self._close(Ending.FAILED, [_lost(error)])
        elif error is not None:
            raise error

    async def _close(self, ending: Ending | None = None, problems: Sequence[Problem] = ()) -> None:
        now_s = self._bench.clock()
        files = new_id("file-", now_s), new_id("file-", now_s)
        await self._held.append(Closed(ending or self.job.ending(now_s), *files, problems))

    # lines

    async def _feed(self) -> None:
        """Begin one line after another; hold as many in memory as may run. What was begun ends, whatever happens."""
        lanes, failure = Lanes(self._bench.slots.most, self._bench.monotonic), None
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    await self._begin_lines(lanes, group)
                    if not await lanes.end_reading():
                        break
            except (LostInput, LostHold, OSError) as error:
                failure = error
        if failure is not None:
            raise failure

    async def _begin_lines(self, lanes: Lanes, group: asyncio.TaskGroup) -> None:
        """Read the file once."""
        lanes.begin_reading()
        async with aclosing(self._held.lines()) as lines:
            async for line in lines:
                if self.job.is_run(line.number) or line.number in self._begun:
                    continue
                call = self._held.read(line)
                lane = lanes.lane("" if isinstance(call, LineError) else call.model)
                if not await lanes.has_room(lane):
                    continue
                await self._can_write.wait()
                self._begun.add(line.number)
                lanes.hold(lane)
                running = group.create_task(self._run_line(line.number, call, lane))
                running.add_done_callback(partial(_release, lanes, lane))

    async def _run_line(self, number: int, call: Call | LineError, lane: Lane) -> None:
        spec = self.job.spec
        if isinstance(call, LineError):
            body = orjson.dumps({"error": {"message": str(call), "code": call.code}})
            row = row_of(spec.batch_id, number, None, Reply(400, body))
        else:
            row = row_of(spec.batch_id, number, call.custom_id, await self._reply(number, call, lane))
        self._rows.append(row)
        self._bench.on_line("ok" if row.is_served else "failed")
        self._num_bytes += len(row.data)
        if self._num_bytes >= FLUSH_BYTES:
            self._news.set()

    async def _reply(self, number: int, call: Call, lane: Lane) -> Reply:
        """Return what the client gets; a line that is refused now waits, however long."""
        said, num_tries, pause_s = request_id(self._held.id, number), 0, 1.0
        while True:
            reply = await self._try(said, call, lane)
            if reply is not None:
                num_tries += 1
                if reply.status < FIRST_FAULT or num_tries == NUM_TRIES:
                    return reply
            await asyncio.sleep(pause_s * self._bench.rng.uniform(0.5, 1.5))
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def _try(self, said: str, call: Call, lane: Lane) -> Reply | None:
        """Return what came of it; None: it is refused for now. What nobody expects fails the line, and no other."""
        try:
            async with self._bench.slots.slot(call.model) as slot:
                self._num_serving += 1
                try:
                    with lane.serving(slot):
                        reply = await self._bench.serve(LineCall(said, self.job.spec.tenant, call.url, call.body, slot))
                finally:
                    self._num_serving -= 1
        except (Overloaded, Unavailable) as error:
            logger.debug("%s waits: %s", said, error)
            self._refused_s = self._bench.monotonic() if self._refused_s is None else self._refused_s
            return None
        except Exception:
            logger.exception("%s failed", said)
            reply = FAULT
        self._refused_s = None
        return reply

    async def _wait_for_news(self, feeding: asyncio.Future[None]) -> None:
        news = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait((feeding, news), timeout=self._bench.tick_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        self._news.clear()

    def _is_flush_due(self) -> bool:
        """The longer a batch runs, the seldomer: whoever reads its log has fewer entries to read."""
        now_s = self._bench.monotonic()
        interval_s = min(MAX_FLUSH_S, (now_s - self._begun_s) / 60)
        return now_s - self._flushed_s >= interval_s or self._num_bytes >= FLUSH_BYTES

    async def _flush(self) -> None:
        """Have the log name the results that there are. They are kept until it does."""
        kept = self._rows[:]
        self._flushed_s = self._bench.monotonic()
        if rows := [row for row in kept if not self.job.is_run(row.number)]:
            self._held.check()
            part = f"{self._bench.clock():017.3f}-{secrets.token_hex(8)}"
            await self._bench.store.create(self._held.log.place.part(part), b"".join(row.encode() for row in rows))
            served = [row.number for row in rows if row.is_served]
            refused = [row.number for row in rows if not row.is_served]
            await self._held.append(Results(part, served, refused, self._bench.clock() + self._bench.lease_s))
        del self._rows[: len(kept)]
        self._num_bytes -= sum(len(row.data) for row in kept)


def _release(lanes: Lanes, lane: Lane, task: asyncio.Task[None]) -> None:
    lanes.release(lane)


def _lost(error: LostInput) -> Problem:
    return Problem("file_not_found", str(error), None, "input_file_id")
