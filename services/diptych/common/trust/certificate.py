"""Finds when a certificate ends, from its PEM; the standard library shows this only for a peer's. Pure."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from typing import Final

_END: Final = "-----END CERTIFICATE-----"
_VERSION: Final = b"\xa0"  # tags of DER
_UTC_TIME: Final = 0x17
_FIELDS_BEFORE_VALIDITY: Final = 3  # serial number, algorithm, issuer


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
