"""The UCX transport: a thin face on the C shim, which owns the thread that makes every UCX call."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from diptych.kvtransfer import metadata as codec
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.errors import PeerUnreachable, TransferError
from diptych.kvtransfer.flow import NO_FLOW, Flow
from diptych.kvtransfer.lanes import SHARED_MEMORY
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.plan import Conversion, Copies, Parts, check_on_device
from diptych.kvtransfer.pool import DevicePool, HostPool
from diptych.kvtransfer.process import is_gone, is_visible, own_identity
from diptych.kvtransfer.transport import (
    InstanceId,
    LinkDown,
    LinkInfo,
    LinkUp,
    NoteReceived,
    OpDone,
    PageIndices,
    PageWrite,
    Refusals,
    TransportEvent,
)
from diptych.kvtransfer.ucx import binding, loader
from diptych.kvtransfer.ucx.allocation import allocate_device_pool, allocate_host_pool
from diptych.kvtransfer.ucx.conversion import (
    accepted,
    device_handle,
    digest_of,
    link_info,
    note_operation,
    page_parts,
    peer_description,
    shim_options,
    write_operation,
)
from diptych.kvtransfer.ucx.doors import Doors, addresses_of, opened_by
from diptych.kvtransfer.ucx.guests import Guests
from diptych.kvtransfer.ucx.options import UcxOptions

logger = logging.getLogger(__name__)

_POLL_BATCH: Final = 256
_ERROR_NBYTES: Final = 512
_ADDRESSES_NBYTES: Final = 1 << 16


@dataclass(slots=True)
class _Link:
    """A link from `connect` until its `LinkDown` was polled."""

    handle: int
    metadata: codec.EngineMetadata
    copies: Copies | None  # what we write to the peer
    is_up: bool = False


@dataclass(frozen=True, slots=True)
class _FormerLink:
    metadata: codec.EngineMetadata
    lanes: str


class UcxTransport:
    """Implements `Transport` over UCX. One a process."""

    def __init__(self, instance_id: InstanceId, options: UcxOptions) -> None:
        self.instance_id = instance_id
        self._library = f"UCX {loader.load().version}"
        self._shim = binding.library()
        self._link_key = codec.new_link_key()
        engine, listeners = opened_by(partial(self._create, options))
        self._doors = Doors(listeners)
        self._engine: int | None = engine
        self._own_addresses = self._list_addresses()
        self._guests = Guests(own_identity().host, self._own_addresses)
        self._descriptor = int(self._shim.kvt_event_fd(self._engine))
        self._pool: HostPool | DevicePool | None = None
        self._links: dict[InstanceId, _Link] = {}
        self._former: dict[InstanceId, _FormerLink] = {}
        self._parts: dict[InstanceId, tuple[Parts, ...]] = {}  # of what each peer wrote, or will
        self._events = (binding.Event * _POLL_BATCH)()

    def allocate_pool(self, layout: PoolLayout) -> HostPool:
        assert self._pool is None, "one pool a transport"
        self._pool = pool = allocate_host_pool(self._open_engine(), layout)
        return pool

    def allocate_device_pool(self, layout: PoolLayout, device: Device) -> DevicePool:
        """Allocate the pool in the memory of `device` in place of the host's. Raises `ConfigError`, `TransferError`."""
        assert self._pool is None, "one pool a transport"
        self._pool = pool = allocate_device_pool(self._open_engine(), layout, device)
        return pool

    def metadata(self) -> bytes:
        own, pool = binding.Peer(), self._own_pool()
        self._shim.kvt_self(self._engine, ctypes.byref(own))
        return codec.encode(
            codec.EngineMetadata(
                process=own_identity(),
                layout=pool.layout,
                pool_base=own.pool_base,
                pool_key=ctypes.string_at(own.pool_key, own.pool_key_len),
                worker_address=ctypes.string_at(own.address, own.address_len),
                library=self._library,
                link_key=self._link_key,
                device_kind=pool.device.kind if isinstance(pool, DevicePool) else "",
                device_handle=device_handle(own),
                addresses=tuple(sorted(self._own_addresses, key=str)[: codec.MAX_ADDRESSES]),
            )
        )

    def connect(self, peer: InstanceId, metadata: bytes) -> None:
        described = codec.decode(metadata, like=self._own_pool().layout)
        if peer in self._links:
            return
        conversion = self._conversion(described)
        if described.library != self._library:
            logger.warning("peer %016x runs %s, we run %s", peer, described.library, self._library)
        self._guests.admit(peer, described)
        self._doors.admit(self._guests.addresses)  # first of all: it may knock already
        info = peer_description(described, is_mappable=self._is_mappable(described))
        handle = self._shim.kvt_connect(self._engine, peer, ctypes.byref(info))
        if handle is None:
            raise MemoryError("no memory for a link")
        self._links[peer] = _Link(handle, described, conversion.copies)
        self._parts[peer] = conversion.parts

    def disconnect(self, peer: InstanceId) -> None:
        if peer in self._links:
            self._shim.kvt_disconnect(self._links[peer].handle)

    def write_pages(self, peer: InstanceId, write: PageWrite, note: bytes = b"", flow: Flow = NO_FLOW) -> int:
        link = self._link(peer)
        if link.copies is None:
            raise TransferError(f"nothing that this rank has belongs into the pages of {peer:016x}")
        all_runs = link.copies.cut(write)
        if isinstance(self._pool, DevicePool):
            self._pool.order_after_kernels()  # kernels may be writing the pages still
        return self._submit(link, write_operation(all_runs, note, flow))

    def send_note(self, peer: InstanceId, note: bytes, *, stream: int = 0, digest: int | None = None) -> int:
        assert note, "an empty note says nothing"
        return self._submit(self._link(peer), note_operation(note, stream, digest))

    def digest_pages(self, pages: PageIndices) -> int:
        wanted = np.ascontiguousarray(pages, dtype=np.int64)
        return accepted(self._shim.kvt_digest_pages(self._engine, len(wanted), wanted.ctypes.data))

    def lands_in_parts(self, peer: InstanceId) -> bool:
        return bool(self._parts.get(peer))

    def unpack_pages(self, peer: InstanceId, pages: PageIndices) -> int:
        if peer not in self._parts:
            raise PeerUnreachable(f"no link to {peer:016x}")
        wanted = np.ascontiguousarray(pages, dtype=np.int64)
        parts = page_parts(self._parts[peer])
        return accepted(self._shim.kvt_unpack_pages(self._engine, len(wanted), wanted.ctypes.data, len(parts), parts))

    def grant_pages(self, peer: InstanceId, pages: PageIndices) -> None:
        granted = np.ascontiguousarray(pages, dtype=np.int64)
        accepted(self._shim.kvt_grant_pages(self._engine, peer, len(granted), granted.ctypes.data))

    def revoke_pages(self, pages: PageIndices) -> None:
        revoked = np.ascontiguousarray(pages, dtype=np.int64)
        accepted(self._shim.kvt_revoke_pages(self._engine, len(revoked), revoked.ctypes.data))

    def refusals(self) -> Refusals:
        if self._engine is None:
            return Refusals()
        shim, engine = self._shim, self._engine
        return Refusals(shim.kvt_num_unauthenticated(engine), shim.kvt_num_ungranted(engine), self._doors.are_open)

    def poll(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        count = _POLL_BATCH if self._engine is not None else 0
        while count == _POLL_BATCH:
            count = self._shim.kvt_poll(self._engine, self._events, _POLL_BATCH)
            events.extend(self._on_event(event) for event in self._events[:count])
        return events

    def fileno(self) -> int:
        return self._descriptor

    def describe(self, peer: InstanceId) -> LinkInfo:
        return link_info(self._status(peer), self._library)

    def paths(self, peer: InstanceId) -> tuple[str, ...]:
        usable = self._status(peer).paths
        return tuple(path for number, path in enumerate(binding.PATHS) if usable >> number & 1)

    def use_path(self, peer: InstanceId, path: str) -> None:
        usable = self.paths(peer)
        if path not in usable:
            raise TransferError(f"no path {path!r} to {peer:016x}, only {', '.join(usable)}")
        accepted(self._shim.kvt_use_path(self._links[peer].handle, binding.PATHS.index(path)))

    def writer_gone(self, peer: InstanceId) -> bool:
        """Closing a link does not unmap shared memory: a stopped peer on this host may go on copying when it wakes."""
        if peer in self._links and self._links[peer].is_up:
            return True  # a peer opens a new link only when its part of the former one has ended
        former = self._former.get(peer)
        if former is None:
            return True
        if is_visible(former.metadata.process):
            return is_gone(former.metadata.process)
        if self._is_mappable(former.metadata):
            return False
        return not any(lane.startswith(SHARED_MEMORY) for lane in former.lanes.split(", "))  # it outlives our endpoint

    @property
    def num_dropped_messages(self) -> int:
        """Messages that belonged to no link: for a former instance, for a former link, or before we connected."""
        return int(self._shim.kvt_num_dropped_messages(self._engine)) if self._engine is not None else 0

    def close(self) -> None:
        """Close every link and stop the thread. The pool's memory is gone after this. Idempotent."""
        if self._engine is None:
            return
        self._doors.close()  # our hold on them
        self._shim.kvt_destroy(self._engine)
        self._engine = None
        for link in self._links.values():
            self._shim.kvt_release(link.handle)
        self._links.clear()

    def _create(self, options: UcxOptions) -> int:
        error = ctypes.create_string_buffer(_ERROR_NBYTES)
        wanted = shim_options(self.instance_id, self._link_key, options)
        engine = self._shim.kvt_create(ctypes.byref(wanted), error, _ERROR_NBYTES)
        if engine is None:
            words = error.value.decode()
            if "No resources" in words:  # as UCX says it of shared memory
                words += "; is System V shared memory used up (ipcs -lm)? --transports tcp needs none"
            raise TransferError(f"{words} (UCX_LOG_LEVEL=info shows more)")
        if error.value:
            logger.warning("%s does not know %s", self._library, error.value.decode())
        return int(engine)

    def _list_addresses(self) -> frozenset[codec.Address]:
        lines = ctypes.create_string_buffer(_ADDRESSES_NBYTES)
        self._shim.kvt_own_addresses(lines, _ADDRESSES_NBYTES)
        return addresses_of(lines.value.decode())

    def _own_pool(self) -> HostPool | DevicePool:
        assert self._pool is not None, "allocate the pool first"
        return self._pool

    def _open_engine(self) -> int:
        assert self._engine is not None, "the transport is closed"
        return self._engine

    def _is_mappable(self, peer: codec.EngineMetadata) -> bool:
        """Whether the peer's pool is in the memory of a device of this host, as ours is."""
        pool = self._own_pool()
        is_alike = isinstance(pool, DevicePool) and pool.device.kind == peer.device_kind
        return is_alike and peer.process.host == own_identity().host

    def _conversion(self, peer: codec.EngineMetadata) -> Conversion:
        """Raises `LayoutMismatch`."""
        pool = self._own_pool()
        conversion = Conversion.between(pool.layout, peer.layout)
        if isinstance(pool, DevicePool):
            check_on_device(conversion, pool.layout)
        return conversion

    def _link(self, peer: InstanceId) -> _Link:
        link = self._links.get(peer)
        if link is None:
            raise PeerUnreachable(f"no link to {peer:016x}")
        return link

    def _submit(self, link: _Link, wanted: binding.Operation) -> int:
        return accepted(self._shim.kvt_submit(link.handle, ctypes.byref(wanted)))

    def _status(self, peer: InstanceId) -> binding.LinkStatus:
        status = binding.LinkStatus()
        self._shim.kvt_describe(self._link(peer).handle, ctypes.byref(status))
        return status

    def _on_event(self, event: binding.Event) -> TransportEvent:
        match event.kind:
            case binding.LINK_UP:
                self._links[event.peer].is_up = True
                return LinkUp(event.peer)
            case binding.LINK_DOWN:
                return self._forget(event.peer, (event.text or b"").decode())
            case binding.OP_DONE:
                return OpDone(event.op, event.text.decode() if event.text else None, digest_of(event), event.seconds)
            case _:
                return NoteReceived(event.peer, ctypes.string_at(event.data, event.data_len), digest_of(event))

    def _forget(self, peer: InstanceId, reason: str) -> LinkDown:
        lanes = self.describe(peer).lanes
        link = self._links.pop(peer)
        self._guests.forget(peer)
        self._doors.admit(self._guests.addresses)
        if link.is_up:  # else no page was ever granted over it, and the one before still counts
            self._former[peer] = _FormerLink(link.metadata, lanes)
        self._shim.kvt_release(link.handle)
        return LinkDown(peer, reason)
