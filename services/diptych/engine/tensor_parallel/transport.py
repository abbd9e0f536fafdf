"""The transfer engines of all ranks as one: rank r of a peer is linked to our rank r, and each pair moves its own part.

A link is up when it is up on every rank; when it fails on one, it is closed on all, and down when it is down on all.
A write ends when every rank's part is remotely complete. Only then does its note leave, by rank 0's link.
"""

from __future__ import annotations

import itertools
import select
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from diptych.engine.tensor_parallel.log_codec import to_bytes
from diptych.engine.tensor_parallel.pool import TensorParallelPool
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.kvtransfer.errors import MalformedMetadata, PeerUnreachable, TransferError, TransferQueueFull
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import (
    InstanceId,
    LinkDown,
    LinkInfo,
    LinkUp,
    NoteReceived,
    OpDone,
    PageIndices,
    Transport,
    TransportEvent,
)
from diptych.v1 import rank_pb2

VERSION: Final = 1


@dataclass(slots=True)
class _Operation:
    name: int
    link: _Link
    num_parts: int  # ranks that still move their pages
    note: bytes  # still to be sent
    error: str | None = None


@dataclass(slots=True)
class _Link:
    up: set[int] = field(default_factory=set)  # ranks
    down: set[int] = field(default_factory=set)  # ranks
    reason: str | None = None  # why it is closing
    moving: set[int] = field(default_factory=set)  # operations whose pages are on their way
    early: list[NoteReceived] = field(default_factory=list)  # before the last rank was up
    notes: deque[_Operation] = field(default_factory=deque)  # in the order in which they must leave


class TensorParallelTransport:
    """Implements `Transport` on rank 0, over its own transport and those of the other ranks."""

    def __init__(self, transport: Transport, log: RankLog) -> None:
        self.instance_id = transport.instance_id
        self._local = transport
        self._log = log
        self._links: dict[InstanceId, _Link] = {}
        self._operations: dict[int, _Operation] = {}
        self._local_names: dict[int, int] = {}  # operation of rank 0's transport -> ours
        self._names = itertools.count(1)
        self._events: list[TransportEvent] = []
        self._epoll = select.epoll()
        for descriptor in (transport.fileno(), log.fileno()):
            self._epoll.register(descriptor, select.EPOLLIN)

    def allocate_pool(self, layout: PoolLayout) -> TensorParallelPool:
        return TensorParallelPool(self._local.allocate_pool(layout), self._log)

    def metadata(self) -> bytes:
        """Collect the metadata of every rank, once."""
        ranks = [self._local.metadata(), *(answer.engine_metadata for answer in self._log.answers())]
        return rank_pb2.RankedEngineMetadata(version=VERSION, ranks=ranks).SerializeToString()

    def connect(self, peer: InstanceId, metadata: bytes) -> None:
        if peer in self._links:
            return
        first, *others = _ranks_of(metadata, self._log.size)
        self._local.connect(peer, first)
        self._links[peer] = _Link()
        parts = [rank_pb2.ConnectPeer(peer=peer, metadata=each) for each in others]
        self._log.append_each([rank_pb2.RankEntry(connect=part) for part in parts])

    def disconnect(self, peer: InstanceId) -> None:
        if peer in self._links:
            self._close(peer, "disconnected")

    def write_pages(self, peer: InstanceId, src: PageIndices, dst: PageIndices, note: bytes = b"") -> int:
        link = self._open_link(peer)
        local = self._local.write_pages(peer, src, dst)  # may refuse; then nothing has happened
        operation = self._new_operation(link, self._log.size, note)
        self._local_names[local] = operation.name
        source, target = (to_bytes(np.asarray(pages, np.int64)) for pages in (src, dst))
        copy = rank_pb2.CopyPages(operation=operation.name, peer=peer, src=source, dst=target)
        self._log.append(rank_pb2.RankEntry(copy=copy))
        link.moving.add(operation.name)
        if note:
            link.notes.append(operation)
        return operation.name

    def send_note(self, peer: InstanceId, note: bytes) -> int:
        link = self._open_link(peer)
        operation = self._new_operation(link, 0, note)
        link.notes.append(operation)
        self._send_due(peer, link)
        return operation.name

    def poll(self) -> list[TransportEvent]:
        for event in self._local.poll():
            self._take(0, event)
        for said in self._log.events():
            self._take(said.rank, _from_wire(said))
        for peer, link in list(self._links.items()):
            self._send_due(peer, link)
            self._forget_if_down(peer, link)
        events, self._events = self._events, []
        return events

    def fileno(self) -> int:
        return self._epoll.fileno()

    def describe(self, peer: InstanceId) -> LinkInfo:
        return self._local.describe(peer)

    def writer_gone(self, peer: InstanceId) -> bool:
        answers = self._log.ask(rank_pb2.RankEntry(is_writer_gone=peer))
        return self._local.writer_gone(peer) and all(answer.is_writer_gone for answer in answers)

    def close(self) -> None:
        self._epoll.close()
        self._local.close()

    # what the ranks report

    def _take(self, rank: int, event: TransportEvent) -> None:
        match event:
            case LinkUp(peer):
                self._take_up(rank, peer)
            case LinkDown(peer, reason):
                self._take_down(rank, peer, reason)
            case NoteReceived(peer):
                link = self._links[peer]
                (self._events if len(link.up) == self._log.size else link.early).append(event)
            case OpDone(operation, error):
                name = self._local_names.pop(operation) if rank == 0 else operation
                self._take_part(self._operations[name], error)

    def _take_up(self, rank: int, peer: InstanceId) -> None:
        link = self._links[peer]
        link.up.add(rank)
        if len(link.up) == self._log.size and link.reason is None:
            self._events += [LinkUp(peer), *link.early]

    def _take_down(self, rank: int, peer: InstanceId, reason: str) -> None:
        self._links[peer].down.add(rank)
        self._close(peer, f"rank {rank}: {reason}")

    def _take_part(self, operation: _Operation, error: str | None) -> None:
        """A rank has moved its pages, or rank 0 has delivered the note."""
        operation.num_parts -= 1
        operation.error = operation.error or error
        if operation.num_parts > 0:
            return
        operation.link.moving.discard(operation.name)
        if operation.error or not operation.note:
            self._end(operation, operation.error)

    # what follows

    def _send_due(self, peer: InstanceId, link: _Link) -> None:
        """Send the notes whose pages have all arrived, in order."""
        while link.notes and link.notes[0].num_parts <= 0:
            operation = link.notes[0]
            try:
                if operation.error is None:
                    self._local_names[self._local.send_note(peer, operation.note)] = operation.name
                    operation.note = b""  # what remains is its own end
            except TransferQueueFull:
                return  # completions make room, and bring us here again
            except TransferError as error:
                self._end(operation, str(error))
            link.notes.popleft()

    def _forget_if_down(self, peer: InstanceId, link: _Link) -> None:
        """A rank may refuse to move pages after its link went down: the last such answer is waited for."""
        if len(link.down) < self._log.size or link.moving:
            return
        assert link.reason is not None
        for operation in link.notes:
            self._end(operation, link.reason)
        self._events.append(LinkDown(peer, link.reason))
        del self._links[peer]

    def _close(self, peer: InstanceId, reason: str) -> None:
        """Close a link on every rank; `LinkDown` follows when all have."""
        link = self._links[peer]
        if link.reason is None:
            link.reason = reason
            self._local.disconnect(peer)
            self._log.append(rank_pb2.RankEntry(disconnect=peer))

    def _end(self, operation: _Operation, error: str | None) -> None:
        if self._operations.pop(operation.name, None) is not None:
            self._events.append(OpDone(operation.name, error))

    def _open_link(self, peer: InstanceId) -> _Link:
        link = self._links.get(peer)
        if link is None or len(link.up) < self._log.size or link.reason is not None:
            raise PeerUnreachable(f"no link to {peer:016x}")
        return link

    def _new_operation(self, link: _Link, num_parts: int, note: bytes) -> _Operation:
        operation = _Operation(next(self._names), link, num_parts, note)
        self._operations[operation.name] = operation
        return operation


def _ranks_of(metadata: bytes, size: int) -> Sequence[bytes]:
    try:
        wire = rank_pb2.RankedEngineMetadata.FromString(metadata)
    except DecodeError as error:
        raise MalformedMetadata(f"not the transfer metadata of several ranks: {error}") from error
    if wire.version != VERSION or len(wire.ranks) != size:
        words = f"transfer metadata of version {wire.version} with {len(wire.ranks)} ranks"
        raise MalformedMetadata(f"{words}; ours is of version {VERSION} with {size}")
    return wire.ranks


def _from_wire(event: rank_pb2.RankEvent) -> TransportEvent:
    match event.WhichOneof("event"):
        case "link_up":
            return LinkUp(event.link_up)
        case "link_down":
            return LinkDown(event.link_down.peer, event.link_down.reason)
        case _:
            return OpDone(event.operation_done.operation, event.operation_done.error or None)
