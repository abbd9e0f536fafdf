"""Files of tenants: what they uploaded, and what batches wrote for them."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import orjson

from diptych.router.batches.log import folder_of
from diptych.router.batches.store import StoreCalls, Writer, as_unreadable

ID: Final = re.compile(r"(file-|batch_)[0-9a-f]{36}")
PIECE_BYTES: Final = 1 << 20  # of a file that is read or written at once


class FileFacts(NamedTuple):
    """What is known of a file."""

    file_id: str
    nbytes: int
    created_s: float
    name: str
    purpose: str


def new_id(prefix: str, now_s: float) -> str:
    """Return an id that nobody guesses; those that are made later come later in the order of texts."""
    return f"{prefix}{int(now_s * 1000):012x}{secrets.token_hex(12)}"


def is_id(text: str) -> bool:
    """Whether it may be the id of anything: ids are parts of paths."""
    return ID.fullmatch(text) is not None


class Upload:
    """A file that is being written. It is there once it is `kept`."""

    def __init__(self, store: StoreCalls, writer: Writer, facts_name: str) -> None:
        self._store = store
        self._writer = writer
        self._facts_name = facts_name
        self._waiting = bytearray()
        self.nbytes = 0

    async def write(self, data: bytes) -> None:
        self.nbytes += len(data)
        self._waiting += data
        if len(self._waiting) >= PIECE_BYTES:
            await self._flush()

    async def keep(self, facts: FileFacts) -> None:
        """Have it there under what is known of it."""
        await self._flush()
        await self._store.do_long(self._writer.close)
        writer = await self._store.writer(self._facts_name)
        await self._store.do_long(writer.write, orjson.dumps(facts._asdict()))
        await self._store.do_long(writer.close)

    async def abort(self) -> None:
        await self._store.do_long(self._writer.abort)

    async def _flush(self) -> None:
        data = bytes(self._waiting)
        self._waiting.clear()
        if data:
            await self._store.do_long(self._writer.write, data)


class Files:
    """All files of a store. Raises `OSError`."""

    def __init__(self, store: StoreCalls) -> None:
        self._store = store

    @asynccontextmanager
    async def upload(self, tenant: str, file_id: str) -> AsyncIterator[Upload]:
        """Give what a file is written with; who leaves without keeping it has written nothing."""
        writer = await self._store.writer(_data(tenant, file_id))
        upload = Upload(self._store, writer, _facts(tenant, file_id))
        try:
            yield upload
        except BaseException:
            await upload.abort()
            raise

    async def find(self, tenant: str, file_id: str) -> FileFacts | None:
        data = await self._store.find(_facts(tenant, file_id))
        with as_unreadable(_facts(tenant, file_id)):
            return FileFacts(**orjson.loads(data)) if data is not None else None

    async def ids(self, tenant: str) -> Sequence[str]:
        """Return the ids of a tenant's files, the oldest first."""
        return sorted(await self._store.names(f"{folder_of(tenant)}/files"))

    async def pieces(self, tenant: str, file_id: str) -> AsyncGenerator[bytes, None]:
        """Yield a file's content. Raises `FileNotFoundError`."""
        start = 0
        while data := await self._store.read(_data(tenant, file_id), start, PIECE_BYTES):
            yield data
            start += len(data)

    async def delete(self, tenant: str, file_id: str) -> None:
        """First what is known of it: who is stopped between leaves nothing that anybody sees."""
        await self._store.delete(_facts(tenant, file_id), _data(tenant, file_id))


def _facts(tenant: str, file_id: str) -> str:
    return f"{folder_of(tenant)}/files/{file_id}"


def _data(tenant: str, file_id: str) -> str:
    return f"{folder_of(tenant)}/contents/{file_id}"
