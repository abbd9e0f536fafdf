"""The log of a batch, as a process reads and appends it: see `job`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple

import orjson

from diptych.router.batches.job import Body, Entry, Job, Spec
from diptych.router.batches.store import StoreCalls, as_unreadable

MAX_AT_ONCE: Final = 16  # entries that are asked for together
OPEN: Final = "open"  # folder of the batches that are not over


def folder_of(tenant: str) -> str:
    """Return where all lies that is a tenant's: nobody else's requests look there."""
    return f"tenants/{sha256(tenant.encode()).hexdigest()[:32]}"


class Place(NamedTuple):
    """Where a batch lies."""

    folder: str  # its tenant's
    batch_id: str

    @classmethod
    def of(cls, spec: Spec) -> Place:
        return cls(folder_of(spec.tenant), spec.batch_id)

    @classmethod
    def marked(cls, mark: str) -> Place:
        """Return the one that a mark in `OPEN` is of."""
        tenant, _, batch_id = mark.partition(".")
        return cls(f"tenants/{tenant}", batch_id)

    @property
    def mark(self) -> str:
        return f"{OPEN}/{self.folder.rpartition('/')[2]}.{self.batch_id}"

    @property
    def parts(self) -> str:
        return f"{self.folder}/parts/{self.batch_id}"

    @property
    def spec(self) -> str:
        return f"{self.folder}/batches/{self.batch_id}"

    def entry(self, number: int) -> str:
        return f"{self.folder}/logs/{self.batch_id}/{number:08d}"

    def part(self, name: str) -> str:
        return f"{self.parts}/{name}"


async def find_spec(store: StoreCalls, place: Place) -> Spec | None:
    """Return what a batch is to do; None: there is none."""
    data = await store.find(place.spec)
    with as_unreadable(place.spec):
        return Spec(**orjson.loads(data)) if data is not None else None


class JobLog:
    """One process's view of a log."""

    def __init__(self, store: StoreCalls, spec: Spec, by: str = "") -> None:
        self._store = store
        self.by = by  # who appends
        self._turn = asyncio.Lock()
        self.place = Place.of(spec)
        self.job = Job(spec)

    async def read_on(self) -> None:
        """Read what others have appended."""
        async with self._turn:
            await self._read_on()

    async def append(self, body: Body, now_s: float) -> bool:
        """Append an entry at the end that is known; False: there was more, which is read now."""
        async with self._turn:
            entry = Entry(self.by, now_s, secrets.token_hex(8), body)
            if await self._store.create(self.place.entry(self.job.num_entries + 1), entry.encode()):
                self.job.apply(entry)
                return True
            return any(each.token == entry.token for each in await self._read_on())

    async def _read_on(self) -> Sequence[Entry]:
        found: list[Entry] = []
        at_once = 1
        while True:
            first = self.job.num_entries + 1
            names = [self.place.entry(number) for number in range(first, first + at_once)]
            for data in await asyncio.gather(*(self._store.find(name) for name in names)):
                if data is None:
                    return found
                with as_unreadable(self.place.entry(self.job.num_entries + 1)):
                    found.append(Entry.decode(data))
                self.job.apply(found[-1])
            at_once = min(MAX_AT_ONCE, 2 * at_once)
