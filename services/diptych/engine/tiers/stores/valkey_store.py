"""A store of objects in Valkey, or any server of its protocol.

An object is a string under one key, which the server replaces and gives up as a whole. What goes when it is full is
the server's to decide (`maxmemory-policy allkeys-lru`), so nothing here lists or counts. Users and passwords are read
from `VALKEY_USERNAME` and `VALKEY_PASSWORD`, so that none is in an URL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Final

from diptych.common.errors import ConfigError
from diptych.engine.options.store_url import is_encrypted
from diptych.engine.tiers.page_format import Buffer
from diptych.engine.tiers.stores.object_store import CALL_S, CONNECT_S, NUM_DELETED, PartsByRequest

LIBRARY: Final = "valkey"  # comes with an extra
PREFIX: Final = "diptych:kv:"  # of keys: the server may have others


class ValkeyStore:
    """Implements `ObjectStore` and `Ranges`. Threads may share it: each call has a connection to itself."""

    def __init__(self, url: str, client: Any) -> None:
        self.url = url
        self._client = client

    def size(self, name: str) -> int | None:
        with _as_os_errors():
            return int(self._client.strlen(PREFIX + name)) or None  # no object is empty

    def read(self, name: str, offset: int, nbytes: int) -> Buffer:
        with _as_os_errors():
            found: bytes = self._client.getrange(PREFIX + name, offset, offset + nbytes - 1)
        if not found and self.size(name) is None:
            raise FileNotFoundError(f"{self.url} has no {name}")
        return found

    def new_parts(self) -> PartsByRequest:
        return PartsByRequest(self)

    def write(self, name: str, data: memoryview) -> None:
        with _as_os_errors():
            self._client.set(PREFIX + name, bytes(data))

    def delete(self, names: Sequence[str]) -> None:
        with _as_os_errors():
            for start in range(0, len(names), NUM_DELETED):
                self._client.unlink(*(PREFIX + name for name in names[start : start + NUM_DELETED]))


def open_valkey(url: str) -> ValkeyStore:
    """Open a store; nothing is asked of it yet. Raises `ConfigError`."""
    try:
        library = import_module(LIBRARY)
    except ImportError:
        raise ConfigError(f"--shared-cache {url} needs valkey: install diptych[valkey]") from None
    options: dict[str, Any] = {
        "username": os.environ.get("VALKEY_USERNAME"),
        "password": os.environ.get("VALKEY_PASSWORD"),
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": CALL_S,
    }
    if is_encrypted(url):
        options["ssl_check_hostname"] = True  # by itself it takes a certificate of any name
    try:
        return ValkeyStore(url, library.Valkey.from_url(url, **options))
    except ValueError as error:
        raise ConfigError(f"--shared-cache {url} can't be used: {error}") from None


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise errors of the library as what they are here."""
    try:
        yield
    except import_module(LIBRARY).exceptions.ValkeyError as error:
        raise OSError(str(error)) from None
