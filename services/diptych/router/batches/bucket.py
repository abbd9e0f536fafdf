"""Objects of batches in a bucket, which must know conditional writes (`If-None-Match: *`), as S3, GCS and Azure do."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, Final

from diptych.common.net.object_stores import as_os_errors, library, open_objects, over_network

CONNECT_S: Final = 5
CALL_S: Final = 20  # less than a lease
PIECE_BYTES: Final = 8 << 20  # of an object that is written in pieces


class _Writer:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        with as_os_errors():
            self._writer.write(data)

    def close(self) -> None:
        with as_os_errors():
            self._writer.close()

    def abort(self) -> None:
        """What was not closed never becomes an object. The bucket's lifecycle rule deletes its pieces."""
        self._writer = None


class Bucket:
    """Implements `BatchStore` over one of the library's."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def create(self, name: str, data: bytes) -> bool:
        try:
            with as_os_errors():
                library().put(self._store, name, data, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    def writer(self, name: str) -> _Writer:
        with as_os_errors():
            return _Writer(library().open_writer(self._store, name, buffer_size=PIECE_BYTES))

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        with as_os_errors():
            if nbytes is None and not start:
                return bytes(library().get(self._store, name).bytes())
            size = int(library().head(self._store, name)["size"])
            end = size if nbytes is None else min(size, start + nbytes)
            return bytes(library().get_range(self._store, name, start=start, end=end)) if start < end else b""

    def names(self, folder: str) -> list[str]:
        with as_os_errors():
            pages = library().list(self._store, prefix=f"{folder}/")
            return [each["path"].rpartition("/")[2] for page in pages for each in page]

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), as_os_errors():
            library().delete(self._store, name)


def open_bucket(url: str) -> Bucket:
    """Nothing is asked of it yet. Raises `ConfigError`."""
    patience = {"retry_timeout": timedelta(seconds=CALL_S)}
    return Bucket(open_objects(f"--batch-store {url}", url, over_network(CONNECT_S, CALL_S, patience)))
