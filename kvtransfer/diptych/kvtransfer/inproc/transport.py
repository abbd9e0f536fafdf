"""One instance of the in-process network. It queues actions; the network performs them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import numpy as np

from diptych.kvtransfer import metadata as codec
from diptych.kvtransfer.errors import PeerUnreachable, TransferQueueFull
from diptych.kvtransfer.inproc.inbox import Inbox
from diptych.kvtransfer.inproc.link import Bye, CopyPage, Finish, Half, Hello
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.pool import HostPool, check_pages
from diptych.kvtransfer.process import own_identity
from diptych.kvtransfer.transport import InstanceId, LinkDown, LinkInfo, OpDone, PageIndices, TransportEvent

MAX_OPS: Final = 4096


class InprocTransport:
    """Implements `Transport`. `open_half` hands a new half of a link to the network."""

    def __init__(self, instance_id: InstanceId, open_half: Callable[[Half], None]) -> None:
        self.instance_id = instance_id
        self.pool: HostPool | None = None
        self.halves: dict[InstanceId, Half] = {}  # open ones
        self.inbox = Inbox()
        self.is_alive = True
        self._former: dict[InstanceId, Half] = {}  # the last closed half to each peer
        self._num_ops = 0  # outstanding
        self._op_ids = itertools.count(1)
        self._open_half = open_half

    def allocate_pool(self, layout: PoolLayout) -> HostPool:
        assert self.pool is None, "one pool a transport"
        layout.validate()
        self.pool = HostPool(layout, memoryview(bytearray(layout.nbytes)))
        return self.pool

    def metadata(self) -> bytes:
        assert self.pool is not None, "allocate the pool first"
        return codec.encode(
            codec.EngineMetadata(own_identity(), self.pool.layout, 1, b"none", b"none", "in one process")
        )

    def connect(self, peer: InstanceId, metadata: bytes) -> None:
        assert self.pool is not None, "allocate the pool first"
        described = codec.decode(metadata, like=self.pool.layout)
        if peer not in self.halves:
            self.halves[peer] = Half(self.instance_id, peer, described.layout.num_pages)
            self.halves[peer].actions.append(Hello())
            self._open_half(self.halves[peer])

    def disconnect(self, peer: InstanceId) -> None:
        half = self.halves.get(peer)
        if half is not None:
            self.close_half(half, "disconnected")
            half.actions.append(Bye("the peer closed the link"))

    def write_pages(self, peer: InstanceId, src: PageIndices, dst: PageIndices, note: bytes = b"") -> int:
        half = self._linked_half(peer)
        source, target = np.asarray(src), np.asarray(dst)
        assert self.pool is not None
        if source.shape != target.shape:
            raise ValueError(f"{source.size} source pages but {target.size} target pages")
        check_pages(source, self.pool.layout.num_pages)
        check_pages(target, half.num_peer_pages)
        half.actions.extend(CopyPage(*pair) for pair in zip(source.tolist(), target.tolist(), strict=True))
        return self._finish(half, note)

    def send_note(self, peer: InstanceId, note: bytes) -> int:
        return self._finish(self._linked_half(peer), note)

    def poll(self) -> list[TransportEvent]:
        events = self.inbox.drain() if self.is_alive else []
        self._num_ops -= sum(isinstance(event, OpDone) for event in events)
        return events

    def fileno(self) -> int:
        return self.inbox.fileno()

    def describe(self, peer: InstanceId) -> LinkInfo:
        return LinkInfo("inproc", "in one process", self._linked_half(peer).bytes_sent, 0.0)

    def writer_gone(self, peer: InstanceId) -> bool:
        former = self._former.get(peer)
        return former is None or former.partner is None or not former.partner.is_open

    def close(self) -> None:
        for peer in list(self.halves):
            self.disconnect(peer)
        self.die()

    def close_half(self, half: Half, reason: str) -> None:
        """Fail what the half has not done, then say that it is down. For the network."""
        half.is_open = False
        half.actions.clear()
        for op in half.ops:
            self.inbox.push(OpDone(op, reason))
        half.ops.clear()
        self.inbox.push(LinkDown(half.peer, reason))
        self._former[half.peer] = self.halves.pop(half.peer)

    def die(self) -> None:
        """Perform nothing and see nothing any more, as a killed process. For the network."""
        if self.is_alive:
            self.is_alive = False
            self.inbox.close()

    def _linked_half(self, peer: InstanceId) -> Half:
        half = self.halves.get(peer)
        if half is None or half.partner is None:
            raise PeerUnreachable(f"no link to {peer:016x}")
        if self._num_ops >= MAX_OPS:
            raise TransferQueueFull(f"{MAX_OPS} operations are in flight")
        return half

    def _finish(self, half: Half, note: bytes) -> int:
        op = next(self._op_ids)
        self._num_ops += 1
        half.ops.append(op)
        half.actions.append(Finish(op, note))
        return op
