"""A batch that a process holds: until it ends or another claims it, this one alone appends to its log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from diptych.router.batches.bench import Bench
from diptych.router.batches.job import Body, Claimed, Job
from diptych.router.batches.lines import Call, Line, LineError, LineSplitter, read_line
from diptych.router.batches.log import JobLog

LINES_AT_ONCE: Final = 256  # of the input, before others have their turn


class LostInput(Exception):
    """The input is not in the store any more, or not all of it."""


class LostHold(Exception):
    """Another process has claimed the batch."""


class HeldBatch:
    """Its log and the lines of its input. Whoever has lost the hold hears so, by `LostHold`, before it appends."""

    def __init__(self, log: JobLog, bench: Bench) -> None:
        self.log = log
        self._bench = bench

    @property
    def job(self) -> Job:
        return self.log.job

    @property
    def id(self) -> str:
        return self.job.spec.batch_id

    async def append(self, body: Body) -> None:
        """Append an entry as the holder of the batch; what others wrote meanwhile is read."""
        while True:
            self.check()
            if await self.log.append(body, self._bench.clock()):
                return

    async def check_needed(self) -> None:
        """Who ended the batch has deleted what it needed: raise `LostHold`."""
        await self.log.read_on()
        self.check()
        if self.job.is_over:
            raise LostHold(f"{self.job.spec.batch_id} is over")

    def check(self) -> None:
        """Raise `LostHold` where the log says that another process has claimed it."""
        if self.job.holder != self.log.by:
            raise LostHold(f"{self.job.spec.batch_id} is worked on by {self.job.holder} now")

    async def renew(self) -> None:
        """Keep holding it."""
        now_s = self._bench.clock()
        if self.job.until_s - now_s < self._bench.lease_s * 2 / 3:
            await self.append(Claimed(now_s + self._bench.lease_s))

    async def lines(self) -> AsyncGenerator[Line, None]:
        """Yield the lines of the input. Raises `LostInput`."""
        spec, splitter = self.job.spec, LineSplitter(self._bench.max_line_bytes)
        try:
            async with aclosing(self._bench.files.pieces(spec.tenant, spec.input_file_id)) as pieces:
                async for data in pieces:
                    for count, line in enumerate(splitter.feed(data), 1):
                        yield line
                        if not count % LINES_AT_ONCE:
                            await asyncio.sleep(0)
                    await self.renew()
        except FileNotFoundError:
            await self.check_needed()
            raise LostInput(f"the file {spec.input_file_id} is not there any more") from None
        for line in splitter.close():
            yield line

    def read(self, line: Line) -> Call | LineError:
        """Return the call that a line asks for, or why it is none."""
        try:
            return read_line(line, self.job.spec.endpoint, self._bench.max_line_bytes)
        except LineError as error:  # it was validated with other limits, or is not what it was
            return error
