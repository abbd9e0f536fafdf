"""Loads the certificates with which members of a platform prove to each other who they are: mutual TLS.

Both ends show a certificate of one authority, which should sign for this platform only. Members are reached by
addresses that come and go, so the name in a certificate is fixed: `--tls-name`. When a certificate ends is read from
its PEM: the standard library shows this only for a peer's.
"""

from __future__ import annotations

import logging
import math
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from diptych.common.errors import ConfigError
from diptych.common.trust.reloaded import Reloaded

logger = logging.getLogger(__name__)

_DAY_S: Final = 86_400.0
WARN_BEFORE_S: Final = 14 * _DAY_S
WARN_EVERY_S: Final = _DAY_S
_END: Final = "-----END CERTIFICATE-----"
_VERSION: Final = b"\xa0"  # tags of DER
_UTC_TIME: Final = 0x17
_FIELDS_BEFORE_VALIDITY: Final = 3  # serial number, algorithm, issuer


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
    expires_s: float  # when `cert` ends, since 1970


class Tls:
    """Our certificate and whom we trust, read again whenever a file changes: new connections use the new ones."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.time) -> None:
        """Raises `ConfigError` for files that can't be used."""
        self.name = files.name
        self._path = files.cert
        self._contents = Reloaded([files.cert, files.key, files.ca], lambda: _read(files))
        self._clock = clock
        self._warned_s = -math.inf
        self._warn_of_the_end(self._contents.current())

    def current(self) -> TlsContents:
        """Return what a new connection should use."""
        contents = self._contents.current()
        self._warn_of_the_end(contents)
        return contents

    def _warn_of_the_end(self, contents: TlsContents) -> None:
        """Once a day, from some time before the certificate ends: gRPC says of one that has ended only "handshake"."""
        now_s = self._clock()
        left_s = contents.expires_s - now_s
        if left_s < WARN_BEFORE_S and now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            words = f"ends in {left_s / _DAY_S:.1f} days" if left_s > 0 else "has ended: nobody connects with it"
            logger.warning("the certificate %s %s; replace it (docs/security.md, Mutual TLS)", self._path, words)


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
    cert = files.cert.read_bytes()
    try:
        end_s = expires_s(cert)
    except ValueError:
        raise ConfigError(f"{files.cert} is no certificate in PEM") from None
    return TlsContents(cert, files.key.read_bytes(), files.ca.read_bytes(), end_s)


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


def expires_s(pem: bytes) -> float:
    """Return the end of the first certificate, in seconds since 1970. Raises `ValueError` if there is none."""
    text = pem.decode("ascii", "replace")
    start = text.index("-----BEGIN CERTIFICATE-----")
    der = ssl.PEM_cert_to_DER_cert(text[start : text.index(_END, start) + len(_END)])
    _, certificate, _ = _value(der)
    _, fields, _ = _value(certificate)
    if fields[:1] == _VERSION:
        fields = _value(fields)[2]
    for _ in range(_FIELDS_BEFORE_VALIDITY):
        fields = _value(fields)[2]
    _, validity, _ = _value(fields)
    tag, not_after, _ = _value(_value(validity)[2])
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(not_after.decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _value(der: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and content of the first value, and what follows it. Raises `ValueError` if it is cut off."""
    if len(der) < 2:
        raise ValueError("the certificate is cut off")
    tag, length, start = der[0], der[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start], "big")
    return tag, der[start : start + length], der[start + length :]
