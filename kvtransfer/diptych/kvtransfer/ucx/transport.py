"""The UCX transport: a thin face on the C shim, which owns the thread that makes every UCX call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash

from diptych.kvtransfer.errors import (
    MalformedMetadata,
    PeerUnreachable,
    TransferError,
    TransferQueueFull,
)
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import (
    InstanceId,
    LinkDown,
    LinkInfo,
    LinkUp,
    NoteReceived,
    OpDone,
    PageIndices,
    TransportEvent,
)
from diptych.kvtransfer.ucx import binding, loader, metadata
from diptych.kvtransfer.ucx.lanes import lane_names
from diptych.kvtransfer.ucx.options import UcxOptions

_POLL_BATCH: Final = 256
_MAX_BLOB: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class UcxPool:
    """Page memory allocated by UCX: shared memory, so that a peer on this host writes it with a plain copy."""

    layout: PoolLayout
    buffer: memoryview

    def digest(self, pages: PageIndices) -> int:
        """Return the XXH3 hash of the pages' bytes, in order."""
        hasher = xxhash.xxh3_64()
        size = self.layout.page_nbytes
        for page in pages.tolist():
            hasher.update(self.buffer[page * size : (page + 1) * size])
        return hasher.intdigest()


class UcxTransport:
    """Implements `Transport` over UCX. One a process."""

    def __init__(self, instance_id: InstanceId, options: UcxOptions) -> None:
        self.instance_id = instance_id
        self._ucx = loader.load()
        self._shim = binding.library()
        self._engine = self._open(options)
        self._descriptor = int(self._shim.kvt_descriptor(self._engine))
        self._pool: UcxPool | None = None
        self._pool_base = 0
        self._peers: dict[InstanceId, metadata.EngineMetadata] = {}  # also those whose link is down
        self._process = metadata.this_process()
        self._events = (binding.Event * _POLL_BATCH)()

    def allocate_pool(self, layout: PoolLayout) -> UcxPool:
        assert self._pool is None, "one pool a transport"
        address = ctypes.c_void_p()
        self._check(self._shim.kvt_allocate(self._engine, layout.nbytes, ctypes.byref(address)), "allocating the pool")
        assert address.value is not None
        memory = (ctypes.c_ubyte * layout.nbytes).from_address(address.value)
        self._pool_base = address.value
        self._pool = UcxPool(layout, memoryview(memory).cast("B"))
        self._check(self._shim.kvt_start(self._engine), "starting the transfer thread")
        return self._pool

    def metadata(self) -> bytes:
        assert self._pool is not None, "allocate the pool first"
        address = self._blob(self._shim.kvt_worker_address, "the worker address")
        key = self._blob(self._shim.kvt_pool_key, "the pool key")
        return metadata.encode(
            metadata.EngineMetadata(address, key, self._pool_base, self._pool.layout, self._process, self._ucx.version)
        )

    def connect(self, peer: InstanceId, data: bytes) -> None:
        assert self._pool is not None, "allocate the pool first"
        other = metadata.decode(data)
        if other.layout.page_nbytes != self._pool.layout.page_nbytes:
            sizes = f"{other.layout.page_nbytes} and {self._pool.layout.page_nbytes}"
            raise MalformedMetadata(f"KV pages differ in size: {sizes} bytes")
        self._peers[peer] = other
        address, key = other.worker_address, other.pool_key
        self._shim.kvt_connect(
            self._engine, peer, address, len(address), key, len(key), other.pool_base, other.layout.nbytes
        )

    def disconnect(self, peer: InstanceId) -> None:
        self._shim.kvt_disconnect(self._engine, peer)

    def write_pages(self, peer: InstanceId, src: PageIndices, dst: PageIndices, note: bytes = b"") -> int:
        assert self._pool is not None
        assert len(src) == len(dst)
        source, target = (np.ascontiguousarray(pages, dtype=np.uint64) for pages in (src, dst))
        size = self._pool.layout.page_nbytes
        return self._submit(peer, size, len(source), source.ctypes.data, target.ctypes.data, note)

    def send_note(self, peer: InstanceId, note: bytes) -> int:
        return self._submit(peer, 1, 0, None, None, note)

    def poll(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        count = _POLL_BATCH
        while count == _POLL_BATCH:
            count = self._shim.kvt_poll(self._engine, self._events, _POLL_BATCH)
            events.extend(self._event(event) for event in self._events[:count])
        return events

    def fileno(self) -> int:
        return self._descriptor

    def describe(self, peer: InstanceId) -> LinkInfo:
        text = ctypes.create_string_buffer(_MAX_BLOB)
        sent, silent = ctypes.c_uint64(), ctypes.c_double()
        pointers = ctypes.byref(sent), ctypes.byref(silent)
        if self._shim.kvt_describe(self._engine, peer, text, _MAX_BLOB, *pointers) < 0:
            raise PeerUnreachable(f"no link to {peer:016x}")
        lanes = lane_names(text.value.decode(errors="replace"))
        return LinkInfo(lanes, f"UCX {self._ucx.version}", sent.value, silent.value)

    def writer_gone(self, peer: InstanceId) -> bool:
        """Closing a link does not unmap shared memory: a stopped peer on this host may go on copying when it wakes."""
        other = self._peers.get(peer)
        if other is None or other.process.scope != self._process.scope:
            return True  # not on this host, so its writes came through the link that is closed
        return other.process.is_gone()

    @property
    def num_stale_messages(self) -> int:
        """Messages that named another instance as their target, and were dropped."""
        return int(self._shim.kvt_stale_messages(self._engine))

    def close(self) -> None:
        """Close every link and stop the thread. The pool's memory is gone after this. Idempotent."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self._shim.kvt_close(engine)

    def _open(self, options: UcxOptions) -> Any:
        status = ctypes.c_int()
        settings = options.settings().encode()
        engine = self._shim.kvt_open(ctypes.byref(_options(self.instance_id, options)), settings, ctypes.byref(status))
        if engine is None:
            raise TransferError(f"UCX can't start: {self._words(status.value)}")
        return engine

    def _submit(self, peer: InstanceId, size: int, count: int, source: Any, target: Any, note: bytes) -> int:
        op = int(self._shim.kvt_write(self._engine, peer, size, count, source, target, note, len(note)))
        if op > 0:
            return op
        if op == binding.UNKNOWN_PEER:
            raise PeerUnreachable(f"no link to {peer:016x}")
        if op == binding.QUEUE_FULL:
            raise TransferQueueFull("too many transfers are in flight")
        raise TransferError("a page index is outside of the pool")

    def _event(self, event: binding.Event) -> TransportEvent:
        if event.kind == binding.LINK_UP:
            return LinkUp(event.peer)
        if event.kind == binding.LINK_DOWN:
            return LinkDown(event.peer, f"{(event.reason or b'').decode()} ({self._words(event.status)})")
        if event.kind == binding.OP_DONE:
            return OpDone(event.op, self._words(event.status) if event.status else None)
        assert event.data is not None
        data = ctypes.string_at(event.data, event.length)
        self._shim.kvt_release(event.data)
        return NoteReceived(event.peer, data)

    def _blob(self, function: Any, what: str) -> bytes:
        blob = ctypes.create_string_buffer(_MAX_BLOB)
        length = function(self._engine, blob, _MAX_BLOB)
        self._check(min(length, 0), what)
        return blob.raw[:length]

    def _check(self, status: int, what: str) -> None:
        if status != 0:
            raise TransferError(f"UCX failed at {what}: {self._words(status)}")

    def _words(self, status: int) -> str:
        words: bytes = self._shim.kvt_status_string(status)
        return words.decode()


def _options(instance_id: InstanceId, options: UcxOptions) -> binding.Options:
    return binding.Options(
        instance_id=instance_id,
        max_operations=options.max_operations,
        max_waiting_notes=options.max_waiting_notes,
        max_posted_bytes=options.max_posted_bytes,
        heartbeat_s=options.heartbeat_s,
        silence_s=options.heartbeat_s * options.heartbeat_misses,
        connect_s=options.connect_s,
    )
