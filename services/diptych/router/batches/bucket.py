"""Objects in S3, GCS or Azure, by `obstore`. Credentials, endpoints and regions are read from the environment, as the
library documents. The bucket must know conditional writes (`If-None-Match: *`), as these three do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any, Final

from diptych.common.errors import ConfigError

LIBRARY: Final = "obstore"  # comes with an extra
CONNECT_S: Final = 5
CALL_S: Final = 20  # less than a lease
PIECE_BYTES: Final = 8 << 20  # of an object that is written in pieces


class _Writer:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        with _as_os_errors():
            self._writer.write(data)

    def close(self) -> None:
        with _as_os_errors():
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
            with _as_os_errors():
                _library().put(self._store, name, data, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    def writer(self, name: str) -> _Writer:
        with _as_os_errors():
            return _Writer(_library().open_writer(self._store, name, buffer_size=PIECE_BYTES))

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        with _as_os_errors():
            if nbytes is None and not start:
                return bytes(_library().get(self._store, name).bytes())
            size = int(_library().head(self._store, name)["size"])
            end = size if nbytes is None else min(size, start + nbytes)
            return bytes(_library().get_range(self._store, name, start=start, end=end)) if start < end else b""

    def names(self, folder: str) -> list[str]:
        with _as_os_errors():
            pages = _library().list(self._store, prefix=f"{folder}/")
            return [each["path"].rpartition("/")[2] for page in pages for each in page]

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            _library().delete(self._store, name)


def open_bucket(url: str) -> Bucket:
    """Nothing is asked of it yet. Raises `ConfigError`."""
    try:
        from_url = import_module(f"{LIBRARY}.store").from_url
    except ImportError:
        raise ConfigError("--batch-store needs obstore for a bucket: install diptych[store]") from None
    may_be_plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")  # as the library reads it
    options = {"connect_timeout": f"{CONNECT_S}s", "timeout": f"{CALL_S}s", "allow_http": may_be_plain}
    try:
        return Bucket(from_url(url, client_options=options, retry_config={"retry_timeout": timedelta(seconds=CALL_S)}))
    except Exception as error:  # of the library, which has its own
        raise ConfigError(f"--batch-store {url} can't be used: {_first_line(error)}") from None


def _library() -> Any:
    return import_module(LIBRARY)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise errors of the library as what they are here."""
    try:
        yield
    except OSError:
        raise
    except _library().exceptions.AlreadyExistsError as error:
        raise FileExistsError(_first_line(error)) from None
    except _library().exceptions.BaseError as error:
        raise OSError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
