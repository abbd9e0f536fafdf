"""One instance of the in-process network. It queues actions; the network performs them."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Final, NoReturn

import numpy as np

from diptych.common.errors import ConfigError
from diptych.kvtransfer import metadata as codec
from diptych.kvtransfer.conversation import Conversation
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.errors import PeerUnreachable, TransferError, TransferQueueFull
from diptych.kvtransfer.event_queue import EventQueue
from diptych.kvtransfer.flow import NO_FLOW, Flow
from diptych.kvtransfer.inproc.link import Half, Operation
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.plan import Conversion, Parts
from diptych.kvtransfer.pool import HostPool, OwnWork, check_pages, num_pages_to_allocate
from diptych.kvtransfer.process import own_identity
from diptych.kvtransfer.transport import (
    ANY_PEER,
    InstanceId,
    LinkDown,
    LinkInfo,
    OpDone,
    PageIndices,
    PageWrite,
    Refusals,
    TransportEvent,
)

MAX_OPS: Final = 4096
WINDOW: Final = 2**62  # notes that a peer may be ahead: its events are not bounded
PATH: Final = "copy"


class InprocTransport:
    """Implements `Transport`. `open_half` hands a new half of a link to the network, whose time `clock` tells."""

    def __init__(
        self,
        instance_id: InstanceId,
        open_half: Callable[[Half], None],
        clock: Callable[[], float],
        *,
        only_granted: bool = False,
    ) -> None:
        self.instance_id = instance_id
        self.link_key = codec.new_link_key()
        self.num_unauthenticated = self.num_ungranted = 0  # counted by the network
        self.pool: HostPool | None = None
        self.halves: dict[InstanceId, Half] = {}  # open ones
        self.own_work: deque[OwnWork] = deque()
        self._parts: dict[InstanceId, tuple[Parts, ...]] = {}  # of what each peer wrote, or will
        self.inbox = EventQueue()
        self.is_alive = True
        self._former: dict[InstanceId, Half] = {}  # the last half to each peer that was up and was closed
        self._peer_sessions: dict[InstanceId, int] = {}  # of peers, in their last link
        self._num_sessions = 0
        self._grants: dict[int, InstanceId] | None = {} if only_granted else None  # by page; None: all to anybody
        self._num_ops = 0  # outstanding
        self._op_ids = itertools.count(1)
        self._open_half = open_half
        self._clock = clock

    def allocate_pool(self, layout: PoolLayout) -> HostPool:
        assert self.pool is None, "one pool a transport"
        layout.validate()
        self.pool = HostPool(layout, memoryview(bytearray(num_pages_to_allocate(layout) * layout.page_nbytes)))
        return self.pool

    def allocate_device_pool(self, layout: PoolLayout, device: Device) -> NoReturn:
        raise ConfigError("pages between threads of one process are in host memory")

    def metadata(self) -> bytes:
        return codec.encode(
            codec.EngineMetadata(
                own_identity(), self._own_pool().layout, 1, b"none", b"none", "in one process", self.link_key
            )
        )

    def connect(self, peer: InstanceId, metadata: bytes) -> None:
        described = codec.decode(metadata, like=self._own_pool().layout)
        if peer not in self.halves:
            conversion = Conversion.between(self._own_pool().layout, described.layout)
            num_pages = num_pages_to_allocate(described.layout)
            talk = self._new_conversation(peer)
            half = Half(self.instance_id, peer, num_pages, described.link_key, talk, conversion.copies)
            half.outbox.append(talk.beat(self._now_ns()))
            self.halves[peer] = half
            self._parts[peer] = conversion.parts
            self._open_half(half)

    def disconnect(self, peer: InstanceId) -> None:
        half = self.halves.get(peer)
        if half is not None:
            self.close_half(half, "disconnected")
            half.outbox.append(half.conversation.bye())

    def write_pages(self, peer: InstanceId, write: PageWrite, note: bytes = b"", flow: Flow = NO_FLOW) -> int:
        half, pool = self._linked_half(peer), self._own_pool()
        if half.copies is None:
            raise TransferError(f"nothing that this rank has belongs into the pages of {peer:016x}")
        all_runs = half.copies.cut(write)
        for runs in all_runs:
            check_pages(runs.src, num_pages_to_allocate(pool.layout))
            check_pages(runs.dst, half.num_peer_pages)
        return self._append(half, flow, Operation(0, all_runs, note, None, math.inf, 0 if flow.with_digest else None))

    def send_note(self, peer: InstanceId, note: bytes, *, stream: int = 0, digest: int | None = None) -> int:
        nothing = Operation(0, (), note, digest, math.inf, None)
        return self._append(self._linked_half(peer), Flow(stream), nothing)

    def digest_pages(self, pages: PageIndices) -> int:
        return self._work(pages, None)

    def lands_in_parts(self, peer: InstanceId) -> bool:
        return bool(self._parts.get(peer))

    def unpack_pages(self, peer: InstanceId, pages: PageIndices) -> int:
        if peer not in self._parts:
            raise PeerUnreachable(f"no link to {peer:016x}")
        return self._work(pages, self._parts[peer])

    def grant_pages(self, peer: InstanceId, pages: PageIndices) -> None:
        check_pages(pages, num_pages_to_allocate(self._own_pool().layout))
        if self._grants is not None:
            self._grants.update(dict.fromkeys(pages.tolist(), peer))

    def revoke_pages(self, pages: PageIndices) -> None:
        if self._grants is not None:
            for page in pages.tolist():
                self._grants.pop(page, None)

    def refusals(self) -> Refusals:
        return Refusals(self.num_unauthenticated, self.num_ungranted)

    def may_write(self, peer: InstanceId, page: int) -> bool:
        """For the network."""
        return self._grants is None or self._grants.get(page) in (peer, ANY_PEER)

    def poll(self) -> list[TransportEvent]:
        events = self.inbox.drain() if self.is_alive else []
        if not events:
            return []
        self._num_ops -= sum(isinstance(event, OpDone) for event in events)
        return events

    def fileno(self) -> int:
        return self.inbox.fileno()

    def describe(self, peer: InstanceId) -> LinkInfo:
        half = self._linked_half(peer)
        return LinkInfo("inproc", "in one process", half.bytes_sent, 0.0, PATH, 0.0, 0, half.queued_bytes)

    def paths(self, peer: InstanceId) -> tuple[str, ...]:
        self._linked_half(peer)
        return (PATH,)

    def use_path(self, peer: InstanceId, path: str) -> None:
        if path not in self.paths(peer):
            raise TransferError(f"no path {path!r} to {peer:016x}, only {PATH!r}")

    def writer_gone(self, peer: InstanceId) -> bool:
        former = self._former.get(peer)
        return former is None or former.partner is None or not former.partner.is_open

    def close(self) -> None:
        for peer in list(self.halves):
            self.disconnect(peer)
        self.die()

    def close_half(self, half: Half, reason: str) -> None:
        """Fail what the half has not done, then say that it is down. For the network."""
        for operation in half.close():
            self.inbox.push(OpDone(operation, reason))
        self.inbox.push(LinkDown(half.peer, reason))
        del self.halves[half.peer]
        self._peer_sessions[half.peer] = max(half.conversation.peer_session, self._peer_sessions.get(half.peer, 0))
        if half.partner is not None:  # one that never came up says nothing about the writer
            self._former[half.peer] = half

    def die(self) -> None:
        """Perform nothing and see nothing any more, as a killed process. For the network."""
        if self.is_alive:
            self.is_alive = False
            self.inbox.close()

    def _new_conversation(self, peer: InstanceId) -> Conversation:
        self._num_sessions += 1
        return Conversation(
            self.instance_id,
            peer,
            self._num_sessions,
            former_session=self._peer_sessions.get(peer, 0),
            window=WINDOW,
            now_ns=self._now_ns(),
        )

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)

    def _linked_half(self, peer: InstanceId) -> Half:
        half = self.halves.get(peer)
        if half is None or half.partner is None:
            raise PeerUnreachable(f"no link to {peer:016x}")
        return half

    def _check_queue(self) -> None:
        if self._num_ops >= MAX_OPS:
            raise TransferQueueFull(f"{MAX_OPS} operations are in flight")

    def _own_pool(self) -> HostPool:
        assert self.pool is not None, "allocate the pool first"
        return self.pool

    def _new_operation(self) -> int:
        self._num_ops += 1
        return next(self._op_ids)

    def _work(self, pages: PageIndices, parts: tuple[Parts, ...] | None) -> int:
        self._check_queue()
        check_pages(np.asarray(pages), num_pages_to_allocate(self._own_pool().layout))
        self.own_work.append(OwnWork(self._new_operation(), np.asarray(pages).tolist(), parts))
        return self.own_work[-1].operation

    def _append(self, half: Half, flow: Flow, operation: Operation) -> int:
        self._check_queue()
        operation.name = self._new_operation()
        if flow.timeout_s is not None:
            operation.deadline_s = self._clock() + flow.timeout_s
        half.append(flow.stream, flow.priority, operation)
        return operation.name
