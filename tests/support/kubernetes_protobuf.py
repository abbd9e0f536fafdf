"""Reads a secret as Kubernetes' own clients write it, in protobuf: those fields that Helm gives its releases."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Final

MAGIC: Final = b"k8s\x00"


def read(body: bytes) -> dict[str, Any]:
    """Return the secret as JSON has it."""
    envelope = dict(_fields(body.removeprefix(MAGIC)))
    fields = list(_fields(envelope[2]))
    metadata = list(_fields(dict(fields)[1]))
    named = dict(metadata)
    labels = {key.decode(): value.decode() for key, value in _entries(metadata, 11)}
    data = {key.decode(): base64.b64encode(value).decode() for key, value in _entries(fields, 2)}
    about = {"name": named[1].decode(), "namespace": named.get(3, b"").decode(), "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": about, "data": data, "type": dict(fields)[3].decode()}


def _entries(fields: list[tuple[int, Any]], number: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield what a map holds."""
    for entry in (dict(_fields(value)) for found, value in fields if found == number):
        yield entry[1], entry.get(2, b"")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield numbers of fields and their values: bytes, or a number."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        value, at = _varint(message, at)
        if tag & 7 == 2:  # bytes of a length
            yield tag >> 3, message[at : at + value]
            at += value
        else:
            assert tag & 7 == 0, "a number"
            yield tag >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1
