"""Does what is left of a batch, for as long as this process holds it.

Rule: a line's result counts once the log names it. What was not named is run again by whoever holds the batch next;
what was named never is. So whatever dies at whatever moment, each line has one result.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import orjson

from diptych.common.errors import Overloaded, Unavailable
from diptych.router.batches.files import FileFacts, Files, Upload, new_id
from diptych.router.batches.job import (
    Body,
    Claimed,
    Closed,
    Ended,
    Job,
    Problem,
    Refused,
    Results,
    Step,
    Validated,
)
from diptych.router.batches.lines import Call, Line, LineSplitter, Validation, read_line
from diptych.router.batches.log import JobLog
from diptych.router.batches.results import Reply, Row, line_not_run, request_id, row_of, rows_of
from diptych.router.batches.slots import Slot, Slots
from diptych.router.batches.store import StoreCalls

logger = logging.getLogger(__name__)

FLUSH_BYTES: Final = 4 << 20  # of results, that are written before that time
MAX_FLUSH_S: Final = 10.0  # between two writes of results, of a batch that has run for ten minutes
MAX_PAUSE_S: Final = 30.0  # before a line is tried again that was refused
NUM_TRIES: Final = 3  # of a line that fails by no fault of its own
FIRST_FAULT: Final = 500  # status of such a failure, or a higher one
PURPOSE: Final = "batch_output"


class LineCall(NamedTuple):
    """A line, as it is to be served."""

    request_id: str
    tenant: str
    url: str
    body: bytes
    slot: Slot  # hears when its prompt is computed


Serve = Callable[[LineCall], Awaitable[Reply]]  # raises `Overloaded` or `Unavailable`: try it again later


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


class JobWork:
    """The work on one batch that was claimed."""

    def __init__(self, log: JobLog, bench: Bench) -> None:
        self._log = log
        self._bench = bench
        self._rows: list[Row] = []  # results that the log does not name yet
        self._num_bytes = 0  # of these
        self._begun_s = self._flushed_s = bench.clock()
        self._begun: set[int] = set()  # lines
        self._news = asyncio.Event()

    @property
    def job(self) -> Job:
        return self._log.job

    def poke(self) -> None:
        """Look at the log now: somebody has cancelled the batch."""
        self._news.set()

    async def run(self) -> None:
        """Return when the batch is over. Raises `LostHold`, and `OSError` where the store fails."""
        steps: Mapping[Step, Callable[[], Awaitable[None]]] = {
            Step.VALIDATE: self._validate,
            Step.RUN: self._run_lines,
            Step.CLOSE: self._close,
            Step.FINISH: self._finish,
        }
        while (step := self.job.next_step(self._bench.clock())) is not Step.NOTHING:
            await steps[step]()
        await self._tidy()

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
        spec, validation = self.job.spec, Validation(self.job.spec.endpoint, self._bench.max_line_bytes)
        try:
            async with aclosing(self._lines()) as lines:
                async for line in lines:
                    validation.check(line)
                    if validation.is_hopeless:
                        break
        except FileNotFoundError:
            words = f"the file {spec.input_file_id} is not there any more"
            validation.problems.append(Problem("file_not_found", words, None, "input_file_id"))
        else:
            validation.end()
        problems = validation.problems
        await self._append(Refused(problems) if problems else Validated(validation.total))

    async def _run_lines(self) -> None:
        """Run lines until all are, or none is to be run any more."""
        self._begun.clear()
        feeding = asyncio.ensure_future(self._feed())
        try:
            while not feeding.done() and self.job.next_step(self._bench.clock()) is Step.RUN:
                await self._wait_for_news(feeding)
                await self._log.read_on()
                if self._is_flush_due():
                    await self._flush()
                await self._renew()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        if not feeding.cancelled() and (error := feeding.exception()):
            raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        await self._flush()

    async def _close(self) -> None:
        now_s = self._bench.clock()
        await self._append(Closed(self.job.ending(now_s), new_id("file-", now_s), new_id("file-", now_s)))

    async def _finish(self) -> None:
        """Write the files. Whoever does this again writes the same ones."""
        job, closed = self.job, self.job.closed
        assert closed is not None
        tenant, upload = job.spec.tenant, self._bench.files.upload
        async with upload(tenant, closed.output_file_id) as output, upload(tenant, closed.error_file_id) as errors:
            await self._write_rows(output, errors)
            if job.validated_s is not None and job.num_done + job.num_failed < job.total:
                await self._write_what_was_not_run(errors, closed)
            await self._keep(output, closed.output_file_id, "output")
            await self._keep(errors, closed.error_file_id, "error")
        await self._append(Ended(bool(output.nbytes), bool(errors.nbytes)))

    async def _tidy(self) -> None:
        """Delete what nobody needs any more. First what says that there is work."""
        place = self._log.place
        await self._bench.store.delete(place.mark, *(place.part(name) for name in self.job.parts))

    # lines

    async def _lines(self) -> AsyncGenerator[Line, None]:
        """Yield the lines of the input."""
        spec, splitter = self.job.spec, LineSplitter(self._bench.max_line_bytes)
        async with aclosing(self._bench.files.pieces(spec.tenant, spec.input_file_id)) as pieces:
            async for data in pieces:
                for line in splitter.feed(data):
                    yield line
                await self._renew()
        for line in splitter.close():
            yield line

    async def _feed(self) -> None:
        """Begin one line after another; hold as many in memory as may run."""
        room = asyncio.Semaphore(self._bench.slots.most)
        async with asyncio.TaskGroup() as group, aclosing(self._lines()) as lines:
            async for line in lines:
                if self.job.is_run(line.number) or line.number in self._begun:
                    continue
                await room.acquire()
                self._begun.add(line.number)
                group.create_task(self._run_line(line)).add_done_callback(lambda task: room.release())

    async def _run_line(self, line: Line) -> None:
        spec = self.job.spec
        call = read_line(line, spec.endpoint, self._bench.max_line_bytes)
        reply = await self._reply(line.number, call)
        self._rows.append(row_of(spec.batch_id, line.number, call.custom_id, reply))
        self._bench.on_line("ok" if reply.status == 200 else "failed")
        self._num_bytes += len(self._rows[-1].data)
        if self._num_bytes >= FLUSH_BYTES:
            self._news.set()

    async def _reply(self, number: int, call: Call) -> Reply:
        """Return what the client gets; a line that is refused now waits, however long."""
        spec, num_tries, pause_s = self.job.spec, 0, 1.0
        said = request_id(spec.batch_id, number)
        while True:
            try:
                async with self._bench.slots.slot() as slot:
                    reply = await self._bench.serve(
                        LineCall(said, spec.tenant, call.url, orjson.dumps(call.body), slot)
                    )
            except (Overloaded, Unavailable) as error:
                logger.debug("%s waits: %s", said, error)
            else:
                num_tries += 1
                if reply.status < FIRST_FAULT or num_tries == NUM_TRIES:
                    return reply
            await asyncio.sleep(pause_s * self._bench.rng.uniform(0.5, 1.5))
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def _wait_for_news(self, feeding: asyncio.Future[None]) -> None:
        news = asyncio.ensure_future(self._news.wait())
        await asyncio.wait((feeding, news), timeout=self._bench.tick_s, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        self._news.clear()

    def _is_flush_due(self) -> bool:
        """The longer a batch runs, the seldomer: whoever reads its log has fewer entries to read."""
        now_s = self._bench.clock()
        interval_s = min(MAX_FLUSH_S, (now_s - self._begun_s) / 60)
        return now_s - self._flushed_s >= interval_s or self._num_bytes >= FLUSH_BYTES

    async def _flush(self) -> None:
        """Have the log name the results that there are."""
        rows, self._rows, self._num_bytes = self._rows, [], 0
        self._flushed_s = self._bench.clock()
        rows = [row for row in rows if not self.job.is_run(row.number)]
        if not rows:
            return
        self._check_held()
        part = f"{self._bench.clock():017.3f}-{secrets.token_hex(8)}"
        await self._bench.store.create(self._log.place.part(part), b"".join(row.encode() for row in rows))
        served = [row.number for row in rows if row.is_served]
        refused = [row.number for row in rows if not row.is_served]
        await self._append(Results(part, served, refused, self._bench.clock() + self._bench.lease_s))

    # files

    async def _keep(self, upload: Upload, file_id: str, kind: str) -> None:
        """Have a file there; none that is empty."""
        if not upload.nbytes:
            return await upload.abort()
        assert self.job.closed_s is not None
        name = f"{self.job.spec.batch_id}_{kind}.jsonl"
        await upload.keep(FileFacts(file_id, upload.nbytes, self.job.closed_s, name, PURPOSE))

    async def _write_rows(self, output: Upload, errors: Upload) -> None:
        written: set[int] = set()
        for name in self.job.parts:
            for row in rows_of(await self._bench.store.read(self._log.place.part(name))):
                if row.number not in written:
                    written.add(row.number)
                    await (output if row.is_served else errors).write(row.data + b"\n")
            await self._renew()

    async def _write_what_was_not_run(self, errors: Upload, closed: Closed) -> None:
        spec = self.job.spec
        async with aclosing(self._lines()) as lines:
            async for line in lines:
                if not self.job.is_run(line.number):
                    call = read_line(line, spec.endpoint, self._bench.max_line_bytes)
                    told = line_not_run(spec.batch_id, line.number, call.custom_id, closed.ending)
                    await errors.write(told + b"\n")
