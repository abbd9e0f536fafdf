"""Certificates with which members of a platform prove to each other who they are: mutual TLS.

Both ends show a certificate of one authority, which should sign for this platform only. Members are reached by
addresses that come and go, so what a certificate must name is fixed: `--tls-name`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from diptych.common.errors import ConfigError
from diptych.common.reloaded import Reloaded


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the files are, PEM each."""

    cert: Path  # ours, followed by what leads from it to the authority's
    key: Path
    ca: Path  # the authority's
    name: str  # that the other end's certificate must have as DNS name


@dataclass(frozen=True, slots=True, repr=False)
class TlsContents:
    """What is in them."""

    cert: bytes
    key: bytes
    ca: bytes


class Tls:
    """Our certificate and whom we trust, read again whenever a file changes: new connections use the new ones."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises `ConfigError` for files that can't be used."""
        self.name = files.name
        self._contents = Reloaded([files.cert, files.key, files.ca], lambda: _read(files))

    def current(self) -> TlsContents:
        """Return what a new connection should use."""
        return self._contents.current()


def _read(files: TlsFiles) -> TlsContents:
    try:
        contents = _contents(files)
        _check(files)
        is_unchanged = _contents(files) == contents
    except OSError as error:
        raise ConfigError(f"can't read {error.filename or files.cert.parent}: {error.strerror}") from None
    if not is_unchanged:
        raise ConfigError(f"{files.cert}, {files.key} and {files.ca} are being replaced")
    return contents


def _contents(files: TlsFiles) -> TlsContents:
    return TlsContents(files.cert.read_bytes(), files.key.read_bytes(), files.ca.read_bytes())


def _check(files: TlsFiles) -> None:
    """Let OpenSSL look at the files, for gRPC fails without saying why."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{files.cert} and {files.key} are no certificate with its key: {_reason(error)}") from None
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{files.ca} holds no certificate of an authority: {_reason(error)}") from None


def _no_password() -> str:
    raise ValueError("the key must not be encrypted")


def _reason(error: Exception) -> str:
    return (isinstance(error, ssl.SSLError) and error.reason) or str(error)
