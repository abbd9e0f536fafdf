"""How a batch ends whose lines have: its files of output and of errors are written, and what made them is deleted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Final

from diptych.router.batches.bench import Bench
from diptych.router.batches.files import FileFacts, Upload
from diptych.router.batches.held import HeldBatch, LostInput
from diptych.router.batches.job import Ended, Ending
from diptych.router.batches.lines import Line, LineError
from diptych.router.batches.log import Place
from diptych.router.batches.results import Row, line_lost, line_not_run, rest_lost, rows_of
from diptych.router.batches.store import StoreCalls

logger = logging.getLogger(__name__)

PURPOSE: Final = "batch_output"


class ResultFiles:
    """Those of one batch, which is closed."""

    def __init__(self, held: HeldBatch, bench: Bench) -> None:
        self._held = held
        self._bench = bench

    async def write(self) -> None:
        """Write the files. Whoever does this again writes the same ones."""
        job, closed = self._held.job, self._held.job.closed
        assert closed is not None
        tenant, upload = job.spec.tenant, self._bench.files.upload
        async with upload(tenant, closed.output_file_id) as output, upload(tenant, closed.error_file_id) as errors:
            written = await self._write_rows(output, errors)
            if job.validated_s is not None and len(written) < job.total:
                await self._write_the_rest(errors, closed.ending, written)
            await self._keep(output, closed.output_file_id, "output")
            await self._keep(errors, closed.error_file_id, "error")
        await self._held.append(Ended(bool(output.nbytes), bool(errors.nbytes)))

    async def _keep(self, upload: Upload, file_id: str, kind: str) -> None:
        """Have a file there; none that is empty."""
        if not upload.nbytes:
            return await upload.abort()
        assert self._held.job.closed_s is not None
        name = f"{self._held.job.spec.batch_id}_{kind}.jsonl"
        await upload.keep(FileFacts(file_id, upload.nbytes, self._held.job.closed_s, name, PURPOSE))

    async def _write_rows(self, output: Upload, errors: Upload) -> set[int]:
        """Return the lines whose results are written now."""
        written: set[int] = set()
        for name in self._held.job.parts:
            for row in await self._rows_of(name):
                if row.number not in written:
                    written.add(row.number)
                    await (output if row.is_served else errors).write(row.data + b"\n")
            await self._held.renew()
        return written

    async def _rows_of(self, name: str) -> Sequence[Row]:
        """Return the rows of a part, as far as they are there."""
        rows: list[Row] = []
        try:
            rows.extend(rows_of(await self._bench.store.read(self._held.log.place.part(name))))
        except (FileNotFoundError, ValueError) as error:
            await self._held.check_needed()
            logger.error("batch %s: results are lost: %s: %s", self._held.id, type(error).__name__, error)
        return rows

    async def _write_the_rest(self, errors: Upload, ending: Ending, written: set[int]) -> None:
        """Tell of lines that were not run, or whose results are lost: by their ids, as far as the input is there."""
        with suppress(LostInput):
            async with aclosing(self._held.lines()) as lines:
                async for line in lines:
                    if line.number not in written:
                        written.add(line.number)
                        await errors.write(self._without_result(line.number, self._custom_id(line), ending))
        for number in self._held.job.lines_run:
            if number not in written:
                written.add(number)
                await errors.write(self._without_result(number, None, ending))
        if (count := self._held.job.total - len(written)) > 0:
            await errors.write(rest_lost(self._held.id, count, ending) + b"\n")

    def _without_result(self, number: int, custom_id: str | None, ending: Ending) -> bytes:
        if self._held.job.is_run(number):
            return line_lost(self._held.id, number, custom_id) + b"\n"
        return line_not_run(self._held.id, number, custom_id, ending) + b"\n"

    def _custom_id(self, line: Line) -> str | None:
        call = self._held.read(line)
        return None if isinstance(call, LineError) else call.custom_id


async def tidy(store: StoreCalls, place: Place) -> None:
    """Delete what nobody needs any more. Last what says that there is work: till then others find it and go on."""
    await store.delete(*(place.part(name) for name in await store.names(place.parts)))
    await store.delete(place.mark)
