"""The calls to the system by which a log is read and written. Tests and benchmarks have slower and worse ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.engine.tiers.record_bytes import Landing


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

    def read_cached(self, descriptor: int, landing: Landing, offset: int) -> None:
        """Have `landing` take what is in memory of records that begin at `offset`, without waiting for the medium."""
        landing.read_cached(descriptor, offset)
