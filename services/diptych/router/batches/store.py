"""Where batches and their files lie: objects by names, of which a name can be taken only once. Waits for disks and
networks; `StoreCalls` has threads do that.

All of it raises `OSError`, `FileNotFoundError` of what is not there. What it returned from is there for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, ParamSpec, Protocol, TypeVar
from urllib.parse import urlsplit

from diptych.common.errors import ConfigError
from diptych.router.batches.bucket import open_bucket
from diptych.router.batches.directory import Directory

NUM_THREADS: Final = 8  # for what is short, leases among it; and as many for uploads and files that are written


class Unreadable(OSError):
    """An object is not what this process can read: it is damaged, or a newer process wrote it."""


@contextmanager
def as_unreadable(name: str) -> Iterator[None]:
    """Raise `Unreadable` where the content of an object is not what it should be."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreadable(f"{name} can't be read here: {type(error).__name__}: {error}") from None


P = ParamSpec("P")
T = TypeVar("T")


class Writer(Protocol):
    """Writes an object in pieces. It is there once it is closed, and never in part."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class BatchStore(Protocol):
    """Names are parts of a path, with `/` between."""

    def create(self, name: str, data: bytes) -> bool:
        """Write an object whose name is free; False: it is taken."""
        ...

    def writer(self, name: str) -> Writer:
        """Write an object, or another one in its place."""
        ...

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """Return so many bytes of an object, or fewer at its end; None: all."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the last parts of the names in a folder."""
        ...

    def delete(self, name: str) -> None:
        """What is not there is deleted."""
        ...


def open_store(url: str) -> BatchStore:
    """Open a directory, or a bucket by its URL. Raises `ConfigError`."""
    if urlsplit(url).scheme in ("s3", "s3a", "gs", "az", "abfs", "abfss"):
        return open_bucket(url)
    path = urlsplit(url).path if url.startswith("file://") else url
    if "://" in path:
        raise ConfigError(f"--batch-store takes a directory or the URL of a bucket (s3://, gs://, az://), not {url!r}")
    try:
        return Directory(path)
    except OSError as error:
        raise ConfigError(f"--batch-store {url} can't be used: {error}") from None


class StoreCalls:
    """A store, as an event loop uses it."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="batches")
        self._long_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="batch-files")

    async def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have a thread do it."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args, **kwargs))

    async def do_long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Likewise, by threads that no lease waits for."""
        return await asyncio.get_running_loop().run_in_executor(self._long_threads, lambda: work(*args, **kwargs))

    async def create(self, name: str, data: bytes) -> bool:
        return await self.do(self._store.create, name, data)

    async def writer(self, name: str) -> Writer:
        return await self.do_long(self._store.writer, name)

    async def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        return await self.do(self._store.read, name, start, nbytes)

    async def find(self, name: str) -> bytes | None:
        """Return an object; None: there is none."""
        try:
            return await self.read(name)
        except FileNotFoundError:
            return None

    async def names(self, folder: str) -> Sequence[str]:
        return await self.do(self._store.names, folder)

    async def delete(self, *names: str) -> None:
        for name in names:
            await self.do(self._store.delete, name)

    def close(self) -> None:
        for threads in (self._threads, self._long_threads):
            threads.shutdown(wait=False, cancel_futures=True)
