"""What a peer needs to link to an instance, to and from `diptych.v1.EngineMetadata`. It travels through bootstrap."""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from diptych.common.errors import ConfigError
from diptych.kvtransfer import plan
from diptych.kvtransfer.errors import MalformedMetadata
from diptych.kvtransfer.layout import PoolLayout, layout_from_wire, layout_to_wire
from diptych.kvtransfer.process import ProcessIdentity
from diptych.v1 import transfer_pb2

VERSION: Final = 3
UCX: Final = "ucx"
LINK_KEY_NBYTES: Final = 16
MAX_ADDRESSES: Final = 64
MAX_PAGE_NBYTES: Final = 1 << 30  # more is nonsense, and we make images of a peer's pages

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class EngineMetadata:
    """One instance's transfer engine, as its peers see it."""

    process: ProcessIdentity
    layout: PoolLayout
    pool_base: int  # address of page 0 in the instance's address space
    pool_key: bytes
    worker_address: bytes
    library: str  # transport library and version, for logs
    link_key: bytes = field(repr=False)  # what every message to the instance carries; random, new at every start
    device_kind: str = ""  # "": the pool is in host memory
    device_handle: bytes = b""  # maps a device's pool in other processes of the host
    backend: str = UCX  # the library that moves pages; the same at both ends
    addresses: tuple[Address, ...] = ()  # that its connections may come from; none: it does not say


def encode(metadata: EngineMetadata) -> bytes:
    process = metadata.process
    return transfer_pb2.EngineMetadata(
        version=VERSION,
        worker_address=metadata.worker_address,
        pool_key=metadata.pool_key,
        pool_base=metadata.pool_base,
        layout=layout_to_wire(metadata.layout),
        process_scope=f"{process.host}/{process.pid_namespace}",
        pid=process.pid,
        process_started=process.start_ticks,
        ucx_version=metadata.library,
        link_key=metadata.link_key,
        device_kind=metadata.device_kind,
        device_handle=metadata.device_handle,
        backend="" if metadata.backend == UCX else metadata.backend,
        addresses=[address.packed for address in metadata.addresses],
    ).SerializeToString()


def decode(data: bytes, *, like: PoolLayout, backend: str = UCX) -> EngineMetadata:
    """Return what `data` says. Raise `MalformedMetadata` unless it is whole and of our version.

    Raise `LayoutMismatch` unless pages can be converted between that pool and one `like` ours.
    """
    wire = _parse(data)
    theirs = wire.backend or UCX
    if theirs != backend:
        raise MalformedMetadata(f"metadata of {theirs}, but we use {backend}: start both with the same --kv-backend")
    if not wire.worker_address or not wire.pool_base or not (wire.pool_key or wire.device_kind):
        raise MalformedMetadata("transfer metadata without an address or a pool")
    if not wire.process_scope or not wire.pid or not wire.process_started:
        raise MalformedMetadata("transfer metadata without a process")
    if len(wire.link_key) != LINK_KEY_NBYTES:
        raise MalformedMetadata(
            f"transfer metadata with a link key of {len(wire.link_key)} bytes, not {LINK_KEY_NBYTES}"
        )
    layout = _layout(wire)
    plan.check(layout, like)
    host, _, namespace = wire.process_scope.partition("/")
    process = ProcessIdentity(host, namespace, wire.pid, wire.process_started)
    return EngineMetadata(
        process=process,
        layout=layout,
        pool_base=wire.pool_base,
        pool_key=wire.pool_key,
        worker_address=wire.worker_address,
        library=wire.ucx_version,
        link_key=wire.link_key,
        backend=theirs,
        device_kind=wire.device_kind,
        device_handle=wire.device_handle,
        addresses=_addresses(wire),
    )


def new_link_key() -> bytes:
    return secrets.token_bytes(LINK_KEY_NBYTES)


def decode_layout(data: bytes) -> PoolLayout:
    """Return what `data` says of the pool alone. Raise `MalformedMetadata` unless it is of our version."""
    return _layout(_parse(data))


def _parse(data: bytes) -> transfer_pb2.EngineMetadata:
    try:
        wire = transfer_pb2.EngineMetadata.FromString(data)
    except DecodeError as error:
        raise MalformedMetadata(f"not transfer metadata: {error}") from error
    if wire.version != VERSION:
        raise MalformedMetadata(f"transfer metadata of version {wire.version}, ours is {VERSION}")
    return wire


def _addresses(wire: transfer_pb2.EngineMetadata) -> tuple[Address, ...]:
    if len(wire.addresses) > MAX_ADDRESSES:
        raise MalformedMetadata(f"transfer metadata with {len(wire.addresses)} addresses, not up to {MAX_ADDRESSES}")
    try:
        return tuple(map(ipaddress.ip_address, wire.addresses))
    except ValueError as error:
        raise MalformedMetadata(f"transfer metadata with an impossible address: {error}") from error


def _layout(wire: transfer_pb2.EngineMetadata) -> PoolLayout:
    layout = layout_from_wire(wire.layout)
    try:
        layout.validate()
    except ConfigError as error:
        raise MalformedMetadata(f"transfer metadata with an impossible pool: {error}") from error
    if layout.page_nbytes > MAX_PAGE_NBYTES:
        raise MalformedMetadata(f"transfer metadata with an impossible pool: pages of {layout.page_nbytes} bytes")
    return layout
