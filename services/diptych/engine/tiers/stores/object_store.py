"""A store of objects by names, as a thread calls it; and S3, GCS and Azure, by `obstore`.

All of it may wait for as long as the library lets it, and raises `OSError`: `FileNotFoundError` of what is not there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from diptych.common.net.object_stores import as_os_errors, library, open_objects, over_network
from diptych.engine.tiers.page_format import Buffer
from diptych.engine.tiers.record_bytes import Landing
from diptych.engine.tiers.records import RecordReader, Run

NUM_DELETED: Final = 1000  # objects that a store deletes at once, at most
CONNECT_S: Final = 1  # after these, a call to a store over the network has failed
CALL_S: Final = 5
PROBE_NBYTES: Final = 2**20  # of an object that is read to measure a store


class Entry(NamedTuple):
    """An object, as it is listed."""

    name: str
    nbytes: int
    written_s: float  # by the store's clock


class ObjectStore(Protocol):
    """Objects are written as a whole, and are read in parts."""

    @property
    def url(self) -> str:
        """For logs."""
        ...

    def size(self, name: str) -> int | None:
        """Return the bytes of an object; None: there is none."""
        ...

    def new_parts(self) -> RecordReader:
        """Return a reader of large parts for one thread. What is measured is an object of `PROBE_NBYTES`."""
        ...

    def write(self, name: str, data: memoryview) -> None:
        """Others see all of it, or what was there before."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, of which some may not be there. Raises `OSError`: then some are there still, perhaps."""
        ...


class ListedStore(ObjectStore, Protocol):
    """One whose users see to it that it does not grow."""

    def entries(self) -> Iterator[Entry]: ...


class Ranges(Protocol):
    """A store of which a part of an object is read by a request of its own."""

    def read(self, name: str, offset: int, nbytes: int) -> Buffer:
        """Return so many bytes of an object, or fewer at its end."""
        ...


class PartsByRequest:
    """Implements `RecordReader` where each read is a request, and nobody knows what is in memory."""

    def __init__(self, store: Ranges) -> None:
        self._store = store

    def prepare(self, run: Run) -> None:
        pass

    def read_cached(self, run: Run, landing: Landing) -> None:
        pass

    def read(self, run: Run, start: int, nbytes: int) -> Buffer:
        return self._store.read(run.where, run.offset + start, nbytes)

    def measure(self, where: str) -> tuple[int, float]:
        began_s = time.monotonic()
        num_read = memoryview(self._store.read(where, 0, PROBE_NBYTES)).nbytes
        return num_read, time.monotonic() - began_s

    def rest(self) -> None:
        pass


class Obstore:
    """Implements `ObjectStore` and `Ranges` over one of the library's."""

    def __init__(self, url: str, store: Any) -> None:
        self.url = url
        self._store = store

    def size(self, name: str) -> int | None:
        with as_os_errors():
            try:
                return int(library().head(self._store, name)["size"])
            except FileNotFoundError:
                return None

    def read(self, name: str, offset: int, nbytes: int) -> Buffer:
        try:
            with as_os_errors():
                return memoryview(library().get_range(self._store, name, start=offset, length=nbytes))
        except FileNotFoundError:
            raise
        except OSError:  # stores disagree about what lies behind an end
            if (size := self.size(name)) is not None and size <= offset:
                return b""
            raise

    def new_parts(self) -> PartsByRequest:
        return PartsByRequest(self)

    def write(self, name: str, data: memoryview) -> None:
        whole = bytes(data)  # the library may keep a view for longer than the call, and who calls writes there again
        with as_os_errors():
            library().put(self._store, name, whole, use_multipart=False)

    def delete(self, names: Sequence[str]) -> None:
        with as_os_errors():
            for start in range(0, len(names), NUM_DELETED):
                self._delete(names[start : start + NUM_DELETED])

    def _delete(self, names: Sequence[str]) -> None:
        try:
            library().delete(self._store, list(names))
        except FileNotFoundError:  # directories and some stores say so, and leave the others
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    library().delete(self._store, name)


def open_bucket(url: str) -> Obstore:
    """Open a store; nothing is asked of it yet. Raises `ConfigError`."""
    options = over_network(CONNECT_S, CALL_S, {"max_retries": 0})
    return Obstore(url, open_objects(f"--shared-cache {url}", url, options))
