"""The calls to the system by which a log is read and written. Tests and benchmarks have slower and worse ones."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

NOT_CACHED: Final = 0
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class Disk:
    """Files by descriptor. Each method but `read_cached` may wait for as long as the medium likes."""

    def open(self, path: Path, flags: int) -> int:
        """Return a descriptor, past the page cache where the file system can."""
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def open_to_read(self, path: Path) -> int:
        """Return a descriptor by way of the page cache. Raises `OSError`."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Write everything. Raises `OSError`; then some of it may be there."""
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Fill `buffers` one after the other; return how many bytes came: fewer at the end of the file."""
        return os.preadv(descriptor, buffers, offset)

    def read_cached(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Do the same with what is in the page cache, without waiting for the medium; 0: nothing is."""
        try:
            return os.preadv(descriptor, buffers, offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return NOT_CACHED
        except OSError as error:
            if error.errno in _REFUSED:
                return NOT_CACHED
            raise
