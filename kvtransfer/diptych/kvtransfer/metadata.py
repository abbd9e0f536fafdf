"""What a peer needs to link to an instance, as bytes that travel through bootstrap. Versioned; strict about its input.

    "DKVT" · u16 version · u64 instance · process · layout · u64 pool base · worker address · rkey

Strings and byte strings are preceded by their length (u32); numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

from diptych.common.errors import ConfigError
from diptych.kvtransfer.errors import MalformedMetadata
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.process import ProcessIdentity

MAGIC: Final = b"DKVT"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<4sHQ")
_PROCESS: Final = struct.Struct("<QIQ")
_LAYOUT: Final = struct.Struct("<5I")
_BASE: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PeerMetadata:
    """One instance, as its peers see it."""

    instance_id: int
    process: ProcessIdentity
    layout: PoolLayout
    pool_base: int  # address of page 0 in the instance's address space
    worker_address: bytes
    rkey: bytes


def encode(metadata: PeerMetadata) -> bytes:
    process, layout = metadata.process, metadata.layout
    return b"".join(
        (
            _HEAD.pack(MAGIC, VERSION, metadata.instance_id),
            _PROCESS.pack(process.pid_namespace, process.pid, process.start_ticks),
            _sized(process.boot_id.encode()),
            _LAYOUT.pack(layout.num_pages, layout.num_layers, layout.page_size, layout.num_kv_heads, layout.head_dim),
            _sized(layout.dtype.encode()),
            _BASE.pack(metadata.pool_base),
            _sized(metadata.worker_address),
            _sized(metadata.rkey),
        )
    )


def decode(data: bytes) -> PeerMetadata:
    """Return what `data` says. Raise `MalformedMetadata` unless it is whole, valid and of our version."""
    reader = _Reader(data)
    try:
        return _decode(reader)
    except (struct.error, UnicodeDecodeError, ConfigError) as error:
        raise MalformedMetadata(f"transfer metadata of {len(data)} bytes can't be read: {error}") from error


def check_compatible(ours: PoolLayout, theirs: PoolLayout) -> None:
    """Raise `MalformedMetadata` unless a page of one pool is a page of the other."""
    if _page_shape(ours) != _page_shape(theirs):
        raise MalformedMetadata(f"KV pages differ: ours are {_page_shape(ours)}, the peer's {_page_shape(theirs)}")


def _page_shape(layout: PoolLayout) -> tuple[tuple[int, ...], str]:
    return layout.shape[1:], layout.dtype


def _decode(reader: _Reader) -> PeerMetadata:
    magic, version, instance_id = reader.unpack(_HEAD)
    if magic != MAGIC:
        raise MalformedMetadata("this is not transfer metadata")
    if version != VERSION:
        raise MalformedMetadata(f"transfer metadata of version {version}, ours is {VERSION}")
    pid_namespace, pid, start_ticks = reader.unpack(_PROCESS)
    process = ProcessIdentity(reader.sized().decode(), pid_namespace, pid, start_ticks)
    num_pages, num_layers, page_size, num_kv_heads, head_dim = reader.unpack(_LAYOUT)
    layout = PoolLayout(num_pages, num_layers, page_size, num_kv_heads, head_dim, reader.sized().decode())
    layout.validate()
    (pool_base,) = reader.unpack(_BASE)
    metadata = PeerMetadata(instance_id, process, layout, pool_base, reader.sized(), reader.sized())
    if instance_id == 0 or not reader.at_end:
        raise MalformedMetadata("transfer metadata without an instance" if not instance_id else "bytes left over")
    return metadata


def _sized(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


class _Reader:
    """A position in bytes that only moves forward; reading past the end raises `struct.error`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    @property
    def at_end(self) -> bool:
        return self._offset == len(self._data)

    def unpack(self, fields: struct.Struct) -> tuple[Any, ...]:
        values = fields.unpack_from(self._data, self._offset)
        self._offset += fields.size
        return values

    def sized(self) -> bytes:
        (length,) = self.unpack(_LENGTH)
        data = self._data[self._offset : self._offset + length]
        if len(data) < length:
            raise struct.error(f"{length} bytes announced, {len(data)} left")
        self._offset += length
        return data
