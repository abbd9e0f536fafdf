"""Batches as their clients see them: made, looked at, cancelled, by whichever process is asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Final

import orjson

from diptych.common.errors import Conflict, NotFound, Overloaded
from diptych.router.batches.job import Cancelled, Job, Spec
from diptych.router.batches.log import OPEN, JobLog, Place, find_spec, folder_of
from diptych.router.batches.store import StoreCalls

MAX_OPEN: Final = 100  # batches of a tenant that are not over
NUM_KEPT: Final = 64  # of logs that were read
NUM_OVER: Final = 1024  # batches that are over, as they are shown
RETRY_AFTER_S: Final = 60


class Jobs:
    """All batches of a store. Raises `OSError`."""

    def __init__(self, store: StoreCalls, clock: Callable[[], float], on_change: Callable[[], None]) -> None:
        self._store = store
        self._clock = clock  # since 1970
        self._on_change = on_change
        self._logs: OrderedDict[Place, JobLog] = OrderedDict()  # the last that were asked for
        self._over: OrderedDict[Place, Job] = OrderedDict()  # likewise: nothing of them changes any more

    async def create(self, spec: Spec) -> Job:
        """The mark comes first: a batch that is there is found by those who run them."""
        num_open = len(await self._marks(spec.tenant))
        if num_open >= MAX_OPEN:
            words = f"{num_open} batches are not over, and more than {MAX_OPEN} can't wait: make this one later"
            raise Overloaded(words, retry_after_s=RETRY_AFTER_S)
        place = Place.of(spec)
        await self._store.create(place.mark, b"")
        await self._store.create(place.spec, orjson.dumps(spec._asdict()))
        self._on_change()
        return Job(spec)

    async def id_by_key(self, tenant: str, key: str, batch_id: str) -> str:
        """Return the id that a client's key stands for: this one, unless it has one already."""
        name = f"{folder_of(tenant)}/keys/{sha256(key.encode()).hexdigest()}"
        if await self._store.create(name, batch_id.encode()):
            return batch_id
        return (await self._store.read(name)).decode()

    async def find(self, tenant: str, batch_id: str) -> Job:
        """Raises `NotFound`."""
        place = Place(folder_of(tenant), batch_id)
        if (job := self._over.get(place)) is None:
            job = (await self._log(tenant, batch_id)).job
            if job.is_over:
                self._over[place] = job = job.without_lines
                self._logs.pop(place, None)
        if job.is_over:
            self._over.move_to_end(place)
        while len(self._over) > NUM_OVER:
            self._over.popitem(last=False)
        return job

    async def ids(self, tenant: str) -> Sequence[str]:
        """Return the ids of a tenant's batches, the oldest first."""
        return sorted(await self._store.names(f"{folder_of(tenant)}/batches"))

    async def cancel(self, tenant: str, batch_id: str) -> Job:
        """Raises `NotFound`, and `Conflict` for one that is over."""
        log = await self._log(tenant, batch_id)
        while log.job.cancelled_s is None:
            if log.job.is_over or log.job.closed is not None:
                raise Conflict(f"the batch {batch_id} is {log.job.status}: there is nothing to cancel any more")
            await log.append(Cancelled(), self._clock())
        self._on_change()
        return log.job

    async def user_of(self, tenant: str, file_id: str) -> str | None:
        """Return a batch that is not over and reads this file."""
        for mark in await self._marks(tenant):
            job = await self._open_job(tenant, Place.marked(mark).batch_id)
            if job is not None and not job.is_over and job.spec.input_file_id == file_id:
                return job.spec.batch_id
        return None

    async def _open_job(self, tenant: str, batch_id: str) -> Job | None:
        try:
            return await self.find(tenant, batch_id)
        except NotFound:
            return None

    async def _marks(self, tenant: str) -> Sequence[str]:
        owner = folder_of(tenant).rpartition("/")[2]
        return [mark for mark in await self._store.names(OPEN) if mark.startswith(f"{owner}.")]

    async def _log(self, tenant: str, batch_id: str) -> JobLog:
        """Return a log, read to its end."""
        place = Place(folder_of(tenant), batch_id)
        log = self._logs.get(place)
        if log is None:
            spec = await find_spec(self._store, place)
            if spec is None:
                raise NotFound(f"there is no batch {batch_id!r}")
            log = JobLog(self._store, spec)
        self._logs[place] = log
        self._logs.move_to_end(place)
        while len(self._logs) > NUM_KEPT:
            self._logs.popitem(last=False)
        await log.read_on()
        return log
