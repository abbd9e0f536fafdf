"""Does what is left of a batch, for as long as this process holds it.

Rule: a line's result counts once the log names it. What was not named is run again by whoever holds the batch next;
what was named never is. So whatever dies at whatever moment, each line has one result.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import orjson

from diptych.common.errors import Overloaded, Unavailable
from diptych.router.batches.files import FileFacts, Files, Upload, new_id
from diptych.router.batches.job import (
    Body,
    Claimed,
    Closed,
    Ended,
    Ending,
    Job,
    Problem,
    Refused,
    Results,
    Step,
    Validated,
)
from diptych.router.batches.lanes import Lane, Lanes
from diptych.router.batches.lines import Call, Line, LineError, LineSplitter, Validation, read_line
from diptych.router.batches.log import JobLog
from diptych.router.batches.results import (
    Reply,
    Row,
    line_lost,
    line_not_run,
    request_id,
    rest_lost,
    row_of,
    rows_of,
)
from diptych.router.batches.slots import Slot, Slots
from diptych.router.batches.store import StoreCalls, Unreadable

logger = logging.getLogger(__name__)

FLUSH_BYTES: Final = 4 << 20  # of results, that are written before that time
MAX_FLUSH_S: Final = 10.0  # between two writes of results, of a batch that has run for ten minutes
MAX_PAUSE_S: Final = 30.0  # before a line is tried again that was refused
NUM_TRIES: Final = 3  # of a line that fails by no fault of its own
FIRST_FAULT: Final = 500  # status of such a failure, or a higher one
PURPOSE: Final = "batch_output"
LINES_AT_ONCE: Final = 256  # of the input, before others have their turn
FAULT: Final = Reply(500, orjson.dumps({"error": {"message": "the router failed", "code": "internal_error"}}))


class LineCall(NamedTuple):
    """A line, as it is to be served."""

    request_id: str
    tenant: str
    url: str
    body: bytes
    slot: Slot  # hears when its prompt is computed


Serve = Callable[[LineCall], Awaitable[Reply]]  # raises `Overloaded` or `Unavailable`: try it again later


class LostInput(Exception):
    """The input is not in the store any more, or not all of it."""


class LostHold(Exception):
    """Another process has claimed the batch."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all batches of a process are done with."""

    store: StoreCalls
    files: Files
    slots: Slots
    serve: Serve
    clock: Callable[[], float]  # since 1970
    lease_s: float
    max_line_bytes: int
    tick_s: float  # between two writes of results, and looks whether the client has cancelled
    on_line: Callable[[str], None] = lambda outcome: None
    rng: random.Random = field(default_factory=random.Random)
    monotonic: Callable[[], float] = time.monotonic  # for what no other process hears of


class JobWork:
    """The work on one batch that was claimed."""

    def __init__(self, log: JobLog, bench: Bench) -> None:
        self._log = log
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
        return self._log.job

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
            Step.FINISH: self._finish,
        }
        while (step := self.job.next_step(self._bench.clock())) is not Step.NOTHING:
            if step is Step.RUN and (self._gives_way or not may_run()):
                return await self.leave()
            await steps[step]()
        await self.tidy()

    async def leave(self) -> None:
        """Have another process take it at once, with the results that there are."""
        if self.job.closed is None:
            await self._flush()
        await self._append(Claimed(0.0))

    async def _append(self, body: Body) -> None:
        """Append an entry as the holder of the batch; what others wrote meanwhile is read."""
        while True:
            self._check_held()
            if await self._log.append(body, self._bench.clock()):
                return

    async def _check_needed(self) -> None:
        """Who ended the batch has deleted what it needed: raise `LostHold`."""
        await self._log.read_on()
        self._check_held()
        if self.job.is_over:
            raise LostHold(f"{self.job.spec.batch_id} is over")

    def _check_held(self) -> None:
        if self.job.holder != self._log.by:
            raise LostHold(f"{self.job.spec.batch_id} is worked on by {self.job.holder} now")

    async def _renew(self) -> None:
        """Keep holding it."""
        now_s = self._bench.clock()
        if self.job.until_s - now_s < self._bench.lease_s * 2 / 3:
            await self._append(Claimed(now_s + self._bench.lease_s))

    # the steps

    async def _validate(self) -> None:
        validation = Validation(self.job.spec.endpoint, self._bench.max_line_bytes)
        try:
            async with aclosing(self._lines()) as lines:
                async for line in lines:
                    validation.check(line)
                    if validation.is_hopeless:
                        break
        except LostInput as error:
            validation.problems.append(_lost(error))
        else:
            validation.end()
        problems = validation.problems
        await self._append(Refused(problems) if problems else Validated(validation.total))

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
            await self._log.read_on()
            if self._is_flush_due() or not self._can_write.is_set():
                await self._flush()
            if not self._can_write.is_set():  # see whether it can
                await self._append(Claimed(self._bench.clock() + self._bench.lease_s))
            await self._renew()
        except Unreadable:
            raise
        except OSError as error:
            if self._can_write.is_set():
                logger.warning("batch %s begins no line until its store can be written: %s", self._id, error)
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

    @property
    def _id(self) -> str:
        return self.job.spec.batch_id

    async def _close(self, ending: Ending | None = None, problems: Sequence[Problem] = ()) -> None:
        now_s = self._bench.clock()
        files = new_id("file-", now_s), new_id("file-", now_s)
        await self._append(Closed(ending or self.job.ending(now_s), *files, problems))

    async def _finish(self) -> None:
        """Write the files. Whoever does this again writes the same ones."""
        job, closed = self.job, self.job.closed
        assert closed is not None
        tenant, upload = job.spec.tenant, self._bench.files.upload
        async with upload(tenant, closed.output_file_id) as output, upload(tenant, closed.error_file_id) as errors:
            written = await self._write_rows(output, errors)
            if job.validated_s is not None and len(written) < job.total:
                await self._write_the_rest(errors, closed.ending, written)
            await self._keep(output, closed.output_file_id, "output")
            await self._keep(errors, closed.error_file_id, "error")
        await self._append(Ended(bool(output.nbytes), bool(errors.nbytes)))

    async def tidy(self) -> None:
        """Delete what nobody needs any more. Last what says that there is work: till then others find it and go on."""
        store, place = self._bench.store, self._log.place
        await store.delete(*(place.part(name) for name in await store.names(place.parts)))
        await store.delete(place.mark)

    # lines

    async def _lines(self) -> AsyncGenerator[Line, None]:
        """Yield the lines of the input. Raises `LostInput`."""
        spec, splitter = self.job.spec, LineSplitter(self._bench.max_line_bytes)
        try:
            async with aclosing(self._bench.files.pieces(spec.tenant, spec.input_file_id)) as pieces:
                async for data in pieces:
                    for count, line in enumerate(splitter.feed(data), 1):
                        yield line
                        if not count % LINES_AT_ONCE:
                            await asyncio.sleep(0)
                    await self._renew()
        except FileNotFoundError:
            await self._check_needed()
            raise LostInput(f"the file {spec.input_file_id} is not there any more") from None
        for line in splitter.close():
            yield line

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
        async with aclosing(self._lines()) as lines:
            async for line in lines:
                if self.job.is_run(line.number) or line.number in self._begun:
                    continue
                call = self._read(line)
                lane = lanes.lane("" if isinstance(call, LineError) else call.model)
                if not await lanes.has_room(lane):
                    continue
                await self._can_write.wait()
                self._begun.add(line.number)
                lanes.hold(lane)
                running = group.create_task(self._run_line(line.number, call, lane))
                running.add_done_callback(partial(_release, lanes, lane))

    def _read(self, line: Line) -> Call | LineError:
        try:
            return read_line(line, self.job.spec.endpoint, self._bench.max_line_bytes)
        except LineError as error:  # it was validated with other limits, or is not what it was
            return error

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

    def _custom_id(self, line: Line) -> str | None:
        call = self._read(line)
        return None if isinstance(call, LineError) else call.custom_id

    async def _reply(self, number: int, call: Call, lane: Lane) -> Reply:
        """Return what the client gets; a line that is refused now waits, however long."""
        said, num_tries, pause_s = request_id(self._id, number), 0, 1.0
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
            self._check_held()
            part = f"{self._bench.clock():017.3f}-{secrets.token_hex(8)}"
            await self._bench.store.create(self._log.place.part(part), b"".join(row.encode() for row in rows))
            served = [row.number for row in rows if row.is_served]
            refused = [row.number for row in rows if not row.is_served]
            await self._append(Results(part, served, refused, self._bench.clock() + self._bench.lease_s))
        del self._rows[: len(kept)]
        self._num_bytes -= sum(len(row.data) for row in kept)

    # files

    async def _keep(self, upload: Upload, file_id: str, kind: str) -> None:
        """Have a file there; none that is empty."""
        if not upload.nbytes:
            return await upload.abort()
        assert self.job.closed_s is not None
        name = f"{self.job.spec.batch_id}_{kind}.jsonl"
        await upload.keep(FileFacts(file_id, upload.nbytes, self.job.closed_s, name, PURPOSE))

    async def _write_rows(self, output: Upload, errors: Upload) -> set[int]:
        """Return the lines whose results are written now."""
        written: set[int] = set()
        for name in self.job.parts:
            for row in await self._rows_of(name):
                if row.number not in written:
                    written.add(row.number)
                    await (output if row.is_served else errors).write(row.data + b"\n")
            await self._renew()
        return written

    async def _rows_of(self, name: str) -> Sequence[Row]:
        """Return the rows of a part, as far as they are there."""
        rows: list[Row] = []
        try:
            rows.extend(rows_of(await self._bench.store.read(self._log.place.part(name))))
        except (FileNotFoundError, ValueError) as error:
            await self._check_needed()
            logger.error("batch %s: results are lost: %s: %s", self._id, type(error).__name__, error)
        return rows

    async def _write_the_rest(self, errors: Upload, ending: Ending, written: set[int]) -> None:
        """Tell of lines that were not run, or whose results are lost: by their ids, as far as the input is there."""
        with suppress(LostInput):
            async with aclosing(self._lines()) as lines:
                async for line in lines:
                    if line.number not in written:
                        written.add(line.number)
                        await errors.write(self._without_result(line.number, self._custom_id(line), ending))
        for number in self.job.lines_run:
            if number not in written:
                written.add(number)
                await errors.write(self._without_result(number, None, ending))
        if (count := self.job.total - len(written)) > 0:
            await errors.write(rest_lost(self._id, count, ending) + b"\n")

    def _without_result(self, number: int, custom_id: str | None, ending: Ending) -> bytes:
        if self.job.is_run(number):
            return line_lost(self._id, number, custom_id) + b"\n"
        return line_not_run(self._id, number, custom_id, ending) + b"\n"


def _release(lanes: Lanes, lane: Lane, task: asyncio.Task[None]) -> None:
    lanes.release(lane)


def _lost(error: LostInput) -> Problem:
    return Problem("file_not_found", str(error), None, "input_file_id")
