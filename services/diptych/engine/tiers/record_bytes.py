"""Pages between a pool and the records of a medium, in C without the GIL: a byte is copied once, and digested then.

Tests hold headers that are made here against `page_format`.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_uint8, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Final

import numpy as np

from diptych.common import native
from diptych.common.native import build_library, declare
from diptych.engine.cache.page_ids import PageId
from diptych.engine.tiers.page_format import HEADER_NBYTES, Buffer, PageFormat, open_headers

READ_RECORDS: Final = 16  # as in C
LEAST_PAGE_NBYTES: Final = 241  # of less, the digest has rules of its own


class _Landing(ctypes.Structure):
    _fields_ = (
        ("pool", c_void_p),
        ("stride", c_int64),
        ("page_nbytes", c_int64),
        ("pages", c_void_p),
        ("expected", c_void_p),
        ("is_sound", c_void_p),
        ("num_records", c_int64),
        ("taken", c_int64),
        ("digest", c_uint64 * 9),
        ("headers", c_uint8 * (READ_RECORDS * HEADER_NBYTES)),
    )


_SIGNATURES: Final[dict[str, tuple[type | None, list[Any]]]] = {
    "land": (None, [c_void_p, c_void_p, c_int64]),
    "read_cached": (c_int, [c_void_p, c_int, c_int64]),
    "gather": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64]),
}


class Landing:
    """Takes the bytes of records as they come, into the pages of a pool, and verifies each page. For one thread."""

    def __init__(self, record: PageFormat, pool: Any) -> None:
        """`pool`: bytes `[num_pages, page_nbytes]`, to be written."""
        self._record = record
        self._library = load()
        self._pool = _rows(pool, record)
        self._run = _Landing(pool.ctypes.data, pool.strides[0], record.page_nbytes)
        self._at = ctypes.addressof(self._run)

    def begin(self, ids: Sequence[PageId], pages: Sequence[int]) -> None:
        """Forget what came before: next are the records of these pages."""
        self._pages = np.array(pages, np.int32)
        assert not len(pages) or 0 <= self._pages.min() <= self._pages.max() < len(self._pool), pages
        self._expected = bytearray(open_headers(self._record, ids))
        self._is_sound = bytearray(len(ids))
        run = self._run
        run.pages, run.expected = self._pages.ctypes.data, _address(self._expected)
        run.is_sound, run.num_records, run.taken = _address(self._is_sound), len(ids), 0

    @property
    def num_taken(self) -> int:
        """Bytes of the records."""
        return int(self._run.taken)

    @property
    def num_left(self) -> int:
        """Bytes of the records."""
        return int(self._run.num_records) * self._record.record_nbytes - int(self._run.taken)

    def read_cached(self, descriptor: int, offset: int) -> None:
        """Take what the system has in memory of a file, whose records begin at `offset`. Raises `OSError`."""
        error = self._library.record_bytes_read_cached(self._at, descriptor, offset)
        if error:
            raise OSError(error, os.strerror(error))

    def take(self, data: Buffer) -> None:
        """Take bytes from elsewhere; there may be more of them than are left."""
        view = np.frombuffer(data, np.uint8)
        self._library.record_bytes_land(self._at, view.ctypes.data, min(len(view), self.num_left))

    def unsound(self) -> list[int]:
        """Return the numbers of the records that are not what they should be, or have not come."""
        return [number for number, is_sound in enumerate(self._is_sound) if not is_sound]


class Gatherer:
    """Copies pages of a pool into records."""

    def __init__(self, record: PageFormat, pool: Any) -> None:
        """`pool`: bytes `[num_pages, page_nbytes]`."""
        self._record = record
        self._library = load()
        self._pool = _rows(pool, record)

    def gather(self, out: memoryview, ids: Sequence[PageId], pages: Sequence[int]) -> None:
        """Write one record a page into `out`, from its beginning."""
        chosen, headers = np.array(pages, np.int32), open_headers(self._record, ids)
        assert len(out) >= len(ids) * self._record.record_nbytes, len(out)
        assert not len(pages) or 0 <= chosen.min() <= chosen.max() < len(self._pool), pages
        self._library.record_bytes_gather(
            _address(out),
            self._pool.ctypes.data,
            self._pool.strides[0],
            self._record.page_nbytes,
            chosen.ctypes.data,
            headers,
            len(ids),
        )


def _rows(pool: Any, record: PageFormat) -> Any:
    assert pool.dtype == np.uint8, pool.dtype
    assert pool.shape[1:] == (record.page_nbytes,), pool.shape
    assert pool.strides[1] == 1, pool.strides
    assert record.page_nbytes >= LEAST_PAGE_NBYTES, record.page_nbytes
    return pool


def _address(writable: Any) -> int:
    return ctypes.addressof(c_uint8.from_buffer(writable))


def build() -> Path:
    """Compile the library, unless that was done before."""
    source = Path(__file__).with_suffix(".c")
    return build_library(source, header_dirs=[Path(native.__file__).parent], flags=("-std=gnu11", "-march=native"))


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library, compiling it at the first call on this machine. Raises `ConfigError` without a compiler."""
    return declare(ctypes.CDLL(str(build())), "record_bytes", _SIGNATURES)
