"""The NIXL transport: a face on the engine's thread."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

import numpy as np

from diptych.common.errors import ConfigError
from diptych.kvtransfer import metadata as codec
from diptych.kvtransfer.conversation import parts_of
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.errors import NoteTooLong, PeerUnreachable, TransferError, TransferQueueFull
from diptych.kvtransfer.event_queue import EventQueue
from diptych.kvtransfer.flow import NO_FLOW, Flow
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.nixl.agent import Agent
from diptych.kvtransfer.nixl.engine import Engine, NixlOptions
from diptych.kvtransfer.nixl.link import Link
from diptych.kvtransfer.nixl.memory import Memory
from diptych.kvtransfer.nixl.streams import Operation, PageCopy
from diptych.kvtransfer.plan import Conversion, Copies, Parts
from diptych.kvtransfer.pool import HostPool, OwnWork, check_pages, num_pages_to_allocate
from diptych.kvtransfer.process import is_gone, is_visible, own_identity
from diptych.kvtransfer.runs import Runs
from diptych.kvtransfer.transport import (
    InstanceId,
    LinkDown,
    LinkInfo,
    LinkUp,
    OpDone,
    PageIndices,
    PageWrite,
    Refusals,
    TransportEvent,
)

BACKEND: Final = "nixl"
PATH: Final = "put"
MAX_NOTE_NBYTES: Final = 16 << 20


@dataclass(slots=True)
class _Linked:
    """A link from `connect` until its `LinkDown` was polled."""

    metadata: codec.EngineMetadata
    copies: Copies | None  # what we write to the peer
    link: Link | None = None  # once the engine has begun it
    is_up: bool = False


class NixlTransport:
    """Implements `Transport` over NIXL. One a process, and no other UCX in it. Pools are in host memory."""

    def __init__(self, instance_id: InstanceId, options: NixlOptions) -> None:
        self.instance_id = instance_id
        self._options = options
        self._agent = Agent(f"{instance_id:016x}", options.transports)
        self._events = EventQueue()
        self._memory: Memory | None = None
        self._engine: Engine | None = None
        self._metadata = b""
        self._links: dict[InstanceId, _Linked] = {}
        self._parts: dict[InstanceId, tuple[Parts, ...]] = {}  # of what each peer wrote, or will
        self._former: dict[InstanceId, codec.EngineMetadata] = {}
        self._op_ids = itertools.count(1)
        self._num_ops = 0  # submitted and not polled as ended

    def allocate_pool(self, layout: PoolLayout) -> HostPool:
        assert self._memory is None, "one pool a transport"
        layout.validate()
        self._memory = Memory(self._agent, layout)
        address, version = self._agent.metadata(), self._agent.version
        key, base = codec.new_link_key(), self._memory.registered.base
        self._metadata = codec.encode(
            codec.EngineMetadata(own_identity(), layout, base, b"nixl", address, version, key, backend=BACKEND)
        )
        self._engine = Engine(self.instance_id, key, self._agent, self._memory, self._options, self._events)
        return self._memory.pool

    def allocate_device_pool(self, layout: PoolLayout, device: Device) -> NoReturn:
        raise ConfigError("--kv-backend nixl moves pages of host memory: use ucx, or --device cpu")

    def metadata(self) -> bytes:
        assert self._metadata, "allocate the pool first"
        return self._metadata

    def connect(self, peer: InstanceId, metadata: bytes) -> None:
        described = codec.decode(metadata, like=self._pool().layout, backend=BACKEND)
        conversion = Conversion.between(self._pool().layout, described.layout)
        if peer not in self._links:
            self._links[peer] = linked = _Linked(described, conversion.copies)
            self._parts[peer] = conversion.parts
            opened = partial(setattr, linked, "link")
            self._running().perform(partial(self._running().open, peer, described, conversion.packs, opened))

    def disconnect(self, peer: InstanceId) -> None:
        self._running().perform(partial(self._running().close, peer, "disconnected"))

    def write_pages(self, peer: InstanceId, write: PageWrite, note: bytes = b"", flow: Flow = NO_FLOW) -> int:
        link, linked = self._link(peer), self._links[peer]
        if linked.copies is None:
            raise TransferError(f"nothing that this rank has belongs into the pages of {peer:016x}")
        all_runs = linked.copies.cut(write)
        for runs in all_runs:
            check_pages(runs.src, num_pages_to_allocate(self._pool().layout))
            check_pages(runs.dst, num_pages_to_allocate(linked.metadata.layout))
        return self._submit(link, flow, all_runs, note, None)

    def send_note(self, peer: InstanceId, note: bytes, *, stream: int = 0, digest: int | None = None) -> int:
        assert note, "an empty note says nothing"
        return self._submit(self._link(peer), Flow(stream), (), note, digest)

    def digest_pages(self, pages: PageIndices) -> int:
        return self._begin(pages, None)

    def lands_in_parts(self, peer: InstanceId) -> bool:
        return bool(self._parts.get(peer))

    def unpack_pages(self, peer: InstanceId, pages: PageIndices) -> int:
        if peer not in self._parts:
            raise PeerUnreachable(f"no link to {peer:016x}")
        return self._begin(pages, self._parts[peer])

    def grant_pages(self, peer: InstanceId, pages: PageIndices) -> None:
        """Bind nobody: NIXL's writes are one-sided."""

    def revoke_pages(self, pages: PageIndices) -> None:
        pass

    def refusals(self) -> Refusals:
        """NIXL's UCX listens to anybody."""
        return Refusals(self._engine.num_unauthenticated, is_open=True) if self._engine is not None else Refusals()

    def poll(self) -> list[TransportEvent]:
        events = self._events.drain() if self._engine is not None else []
        for event in events:
            match event:
                case OpDone():
                    self._num_ops -= 1
                case LinkUp(peer):
                    self._links[peer].is_up = True
                case LinkDown(peer):
                    self._former[peer] = self._links.pop(peer).metadata
        return events

    def fileno(self) -> int:
        return self._events.fileno()

    def describe(self, peer: InstanceId) -> LinkInfo:
        link = self._link(peer)
        heard_s = (time.monotonic_ns() - link.conversation.heard_ns) / 1e9
        return LinkInfo(
            lanes="UCX, chosen by NIXL",
            version=self._agent.version,
            bytes_sent=link.bytes_sent,
            last_heard_s=heard_s,
            path=PATH,
            rtt_s=link.conversation.rtt_s,
            in_flight_bytes=link.in_flight_bytes,
            queued_bytes=link.queued_bytes,
        )

    def paths(self, peer: InstanceId) -> tuple[str, ...]:
        self._link(peer)
        return (PATH,)

    def use_path(self, peer: InstanceId, path: str) -> None:
        if path not in self.paths(peer):
            raise TransferError(f"no path {path!r}: NIXL chooses how pages travel, and that is {PATH!r} here")

    def writer_gone(self, peer: InstanceId) -> bool:
        """NIXL can't revoke what a peer may do: it may write until its process is gone, wherever it runs."""
        if peer in self._links and self._links[peer].is_up:
            return True  # a peer begins a new link only when its part of the former one has ended
        former = self._former.get(peer)
        return former is None or (is_visible(former.process) and is_gone(former.process))

    @property
    def num_dropped_messages(self) -> int:
        """Messages that belonged to no link."""
        return self._engine.num_dropped if self._engine is not None else 0

    def close(self) -> None:
        """Close every link and stop the thread. Idempotent."""
        if self._engine is None:
            return
        self._engine.stop()
        self._engine = None
        self._events.close()
        self._links.clear()

    def _submit(self, link: Link, flow: Flow, runs: Sequence[Runs], note: bytes, note_digest: int | None) -> int:
        if len(note) > MAX_NOTE_NBYTES:
            raise NoteTooLong(f"a note of {len(note)} bytes; {MAX_NOTE_NBYTES} are possible")
        now_s = time.monotonic()
        deadline_s = math.inf if flow.timeout_s is None else now_s + flow.timeout_s
        engine = self._running()
        with engine.lock:
            if not link.is_accepting:
                raise PeerUnreachable(f"no link to {link.peer:016x}")
            operation = Operation(
                self._new_operation(),
                flow.stream,
                flow.priority,
                deadline_s,
                deque(_copied(each) for each in runs if len(each.dst)),
                deque(parts_of(note)),
                note_digest,
                0 if flow.with_digest else None,
            )
            operation.began_s = now_s
            link.submitted.append(operation)
        engine.wake()
        return operation.name

    def _begin(self, pages: PageIndices, parts: tuple[Parts, ...] | None) -> int:
        check_pages(np.asarray(pages), num_pages_to_allocate(self._pool().layout))
        work = OwnWork(self._new_operation(), np.asarray(pages).tolist(), parts)
        self._running().perform(partial(self._running().begin, work))
        return work.operation

    def _new_operation(self) -> int:
        if self._num_ops >= self._options.max_operations:
            raise TransferQueueFull(f"{self._num_ops} operations are open")
        self._num_ops += 1
        return next(self._op_ids)

    def _link(self, peer: InstanceId) -> Link:
        linked = self._links.get(peer)
        if linked is None or linked.link is None:
            raise PeerUnreachable(f"no link to {peer:016x}")
        return linked.link

    def _pool(self) -> HostPool:
        assert self._memory is not None, "allocate the pool first"
        return self._memory.pool

    def _running(self) -> Engine:
        assert self._engine is not None, "allocate the pool first"
        return self._engine


def _copied(runs: Runs) -> PageCopy:
    """What the caller's arrays say now."""
    src, dst = runs.src.copy(), runs.dst.copy()
    if runs.pack is None:
        return PageCopy(src, dst, runs.window)
    return PageCopy(runs.first_tokens, dst, runs.window, runs.pack, src)


def open_transport(instance_id: InstanceId, *, options: NixlOptions) -> NixlTransport:
    """Open this process's transport. Raises `ConfigError` without NIXL."""
    return NixlTransport(instance_id, options)
