"""The UCX transport: a thin face on the C shim, which owns the thread that makes every UCX call."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from typing import Final

import numpy as np

from diptych.kvtransfer import metadata as codec
from diptych.kvtransfer.errors import (
    PeerUnreachable,
    TransferError,
)
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.pool import HostPool, byte_window, num_pages_to_allocate
from diptych.kvtransfer.process import is_gone, is_visible, own_identity
from diptych.kvtransfer.transport import (
    NO_FLOW,
    Flow,
    InstanceId,
    LinkDown,
    LinkInfo,
    LinkUp,
    NoteReceived,
    OpDone,
    PageIndices,
    PageWrite,
    TransportEvent,
)
from diptych.kvtransfer.ucx import binding, loader
from diptych.kvtransfer.ucx.conversion import (
    accepted,
    digest_of,
    link_info,
    note_operation,
    shim_options,
    write_operation,
)
from diptych.kvtransfer.ucx.options import UcxOptions

logger = logging.getLogger(__name__)

_POLL_BATCH: Final = 256
_ERROR_NBYTES: Final = 512
_SHARED_MEMORY: Final = ("sysv", "posix", "cma", "xpmem", "knem")  # lanes that outlive the endpoint at our end


@dataclass(slots=True)
class _Link:
    """A link from `connect` until its `LinkDown` was polled."""

    handle: int
    metadata: codec.EngineMetadata
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
        self._engine: int | None = self._create(options)
        self._descriptor = int(self._shim.kvt_event_fd(self._engine))
        self._pool: HostPool | None = None
        self._links: dict[InstanceId, _Link] = {}
        self._former: dict[InstanceId, _FormerLink] = {}
        self._events = (binding.Event * _POLL_BATCH)()

    def allocate_pool(self, layout: PoolLayout) -> HostPool:
        assert self._pool is None, "one pool a transport"
        layout.validate()
        num_pages = num_pages_to_allocate(layout)
        address, error = ctypes.c_void_p(), ctypes.create_string_buffer(_ERROR_NBYTES)
        status = self._shim.kvt_allocate(
            self._engine, layout.page_nbytes, num_pages, ctypes.byref(address), error, _ERROR_NBYTES
        )
        if status != 0:
            words = error.value.decode()
            raise TransferError(f"{words} ({layout.nbytes / 2**20:.0f} MiB; UCX_LOG_LEVEL=info shows more)")
        assert address.value is not None
        memory = (ctypes.c_ubyte * (num_pages * layout.page_nbytes)).from_address(address.value)
        self._pool = HostPool(layout, memoryview(memory).cast("B"))
        return self._pool

    def metadata(self) -> bytes:
        own, layout = binding.Peer(), self._own_layout()
        self._shim.kvt_self(self._engine, ctypes.byref(own))
        key, address = ctypes.string_at(own.key, own.key_len), ctypes.string_at(own.address, own.address_len)
        return codec.encode(codec.EngineMetadata(own_identity(), layout, own.pool_base, key, address, self._library))

    def connect(self, peer: InstanceId, metadata: bytes) -> None:
        described = codec.decode(metadata, like=self._own_layout())
        if peer in self._links:
            return
        if described.library != self._library:
            logger.warning("peer %016x runs %s, we run %s", peer, described.library, self._library)
        address, key = described.worker_address, described.pool_key
        info = binding.Peer(
            address=ctypes.cast(ctypes.c_char_p(address), ctypes.c_void_p),
            address_len=len(address),
            key=ctypes.cast(ctypes.c_char_p(key), ctypes.c_void_p),
            key_len=len(key),
            pool_base=described.pool_base,
            num_pages=num_pages_to_allocate(described.layout),
            page_nbytes=described.layout.page_nbytes,
        )
        handle = self._shim.kvt_connect(self._engine, peer, ctypes.byref(info))
        if handle is None:
            raise MemoryError("no memory for a link")
        self._links[peer] = _Link(handle, described)

    def disconnect(self, peer: InstanceId) -> None:
        if peer in self._links:
            self._shim.kvt_disconnect(self._links[peer].handle)

    def write_pages(self, peer: InstanceId, write: PageWrite, note: bytes = b"", flow: Flow = NO_FLOW) -> int:
        src, dst = (np.ascontiguousarray(pages, dtype=np.int64) for pages in (write.src, write.dst))
        return self._submit(peer, write_operation(src, dst, byte_window(self._own_layout(), write), note, flow))

    def send_note(self, peer: InstanceId, note: bytes, *, stream: int = 0, digest: int | None = None) -> int:
        assert note, "an empty note says nothing"
        return self._submit(peer, note_operation(note, stream, digest))

    def digest_pages(self, pages: PageIndices) -> int:
        wanted = np.ascontiguousarray(pages, dtype=np.int64)
        return accepted(int(self._shim.kvt_digest_pages(self._engine, len(wanted), wanted.ctypes.data)))

    def poll(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        count = _POLL_BATCH if self._engine is not None else 0
        while count == _POLL_BATCH:
            count = self._shim.kvt_poll(self._engine, self._events, _POLL_BATCH)
            events.extend(self._take(event) for event in self._events[:count])
        return events

    def fileno(self) -> int:
        return self._descriptor

    def describe(self, peer: InstanceId) -> LinkInfo:
        return link_info(self._status(peer), self._library)

    def paths(self, peer: InstanceId) -> tuple[str, ...]:
        ways = self._status(peer).ways
        return tuple(path for way, path in enumerate(binding.PATHS) if ways >> way & 1)

    def use_path(self, peer: InstanceId, path: str) -> None:
        usable = self.paths(peer)
        if path not in usable:
            raise TransferError(f"no path {path!r} to {peer:016x}, only {', '.join(usable)}")
        accepted(int(self._shim.kvt_use_way(self._links[peer].handle, binding.PATHS.index(path))))

    def writer_gone(self, peer: InstanceId) -> bool:
        """Closing a link does not unmap shared memory: a stopped peer on this host may go on copying when it wakes."""
        if peer in self._links and self._links[peer].is_up:
            return True  # a peer opens a new link only when its part of the former one has ended
        former = self._former.get(peer)
        if former is None:
            return True
        if is_visible(former.metadata.process):
            return is_gone(former.metadata.process)
        return not any(lane.startswith(_SHARED_MEMORY) for lane in former.lanes.split(", "))

    @property
    def num_dropped_messages(self) -> int:
        """Messages that belonged to no link: for a former instance, for a former link, or before we connected."""
        return int(self._shim.kvt_num_dropped_messages(self._engine)) if self._engine is not None else 0

    def close(self) -> None:
        """Close every link and stop the thread. The pool's memory is gone after this. Idempotent."""
        if self._engine is None:
            return
        self._shim.kvt_destroy(self._engine)
        self._engine = None
        for link in self._links.values():
            self._shim.kvt_release(link.handle)
        self._links.clear()

    def _create(self, options: UcxOptions) -> int:
        error = ctypes.create_string_buffer(_ERROR_NBYTES)
        wanted = shim_options(self.instance_id, options)
        engine = self._shim.kvt_create(ctypes.byref(wanted), error, _ERROR_NBYTES)
        if engine is None:
            raise TransferError(f"{error.value.decode()} (UCX_LOG_LEVEL=info shows more)")
        if error.value:
            logger.warning("%s does not know %s", self._library, error.value.decode())
        return int(engine)

    def _own_layout(self) -> PoolLayout:
        assert self._pool is not None, "allocate the pool first"
        return self._pool.layout

    def _submit(self, peer: InstanceId, wanted: binding.Operation) -> int:
        link = self._links.get(peer)
        if link is None:
            raise PeerUnreachable(f"no link to {peer:016x}")
        return accepted(int(self._shim.kvt_submit(link.handle, ctypes.byref(wanted))))

    def _status(self, peer: InstanceId) -> binding.LinkStatus:
        if peer not in self._links:
            raise PeerUnreachable(f"no link to {peer:016x}")
        status = binding.LinkStatus()
        self._shim.kvt_describe(self._links[peer].handle, ctypes.byref(status))
        return status

    def _take(self, event: binding.Event) -> TransportEvent:
        match event.kind:
            case binding.LINK_UP:
                self._links[event.peer].is_up = True
                return LinkUp(event.peer)
            case binding.LINK_DOWN:
                return self._forget(event.peer, (event.text or b"").decode())
            case binding.OP_DONE:
                return OpDone(event.op, event.text.decode() if event.text else None, digest_of(event))
            case _:
                return NoteReceived(event.peer, ctypes.string_at(event.data, event.data_len), digest_of(event))

    def _forget(self, peer: InstanceId, reason: str) -> LinkDown:
        lanes = self.describe(peer).lanes
        link = self._links.pop(peer)
        if link.is_up:  # else no page was ever granted over it, and the one before still counts
            self._former[peer] = _FormerLink(link.metadata, lanes)
        self._shim.kvt_release(link.handle)
        return LinkDown(peer, reason)
