"""A directory of files that is a store of objects, on this machine or mounted from another. Implements `ListedStore`.

An object has the path that is its name. It is written beside it and then renamed, so that others see all of it, or what
was there before. Who is killed before that leaves a file that is listed too, and goes when it is among the oldest.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from diptych.common.errors import ConfigError
from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.file_reader import FileReader
from diptych.engine.tiers.stores.object_store import Entry

SMALL_NBYTES: Final = 2**21


class DirectoryStore:
    """Threads may share it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder

    def size(self, name: str) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(self._folder / name).st_size
        return None

    def new_parts(self) -> FileReader:
        return FileReader(_SmallFiles(), self._folder)

    def write(self, name: str, data: memoryview) -> None:
        path = self._folder / name
        beside = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(4)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(beside, "xb", buffering=0)  # noqa: SIM115  what another writes there is not ours to delete
        try:
            with file:
                while data:
                    data = data[file.write(data) :]
            os.replace(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / name)

    def entries(self) -> Iterator[Entry]:
        for folder, _, names in os.walk(self._folder, onerror=_raise):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):  # others delete, too
                    found = os.stat(path)
                    yield Entry(str(path.relative_to(self._folder)), found.st_size, found.st_mtime)


class _SmallFiles(Disk):
    """Has small files read at once where they are not in memory, so that a thread waits once, and not for each part.

    Of large ones the system reads ahead by itself, into larger pages of its cache, from which copies cost half.
    """

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        if os.fstat(descriptor).st_size <= SMALL_NBYTES:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        return super().read(descriptor, buffers, offset)


def open_directory(url: str, folder: str) -> DirectoryStore:
    """Open a directory, which is made for this user alone. Raises `ConfigError`."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"--shared-cache {url} can't be used: {error}") from None
    return DirectoryStore(url, Path(folder))


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
