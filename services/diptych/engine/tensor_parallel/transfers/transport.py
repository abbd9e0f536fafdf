"""The transfer engines of all ranks of an instance as one; each rank links to those of the peer that its pages concern.

A link is up when it is up on every rank; when it fails on one, it is closed on all, and down when it is down on all.
A write ends when every rank's part is remotely complete. Only then does its note leave, by rank 0's link, with the sum
of the ranks' digests. Between an instance of one rank and a peer of one rank there is nothing to wait for: calls and
events go straight to and from rank 0's transport.
"""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable
from typing import Final

from diptych.engine.tensor_parallel.rank_log import NoRanks, RankLog, copy_to_wire, page_bytes
from diptych.engine.tensor_parallel.transfers.fan_out import FanOut
from diptych.engine.tensor_parallel.transfers.ranked_link import Operation, RankedLink, Stream, ranks_of, sum_digests
from diptych.kvtransfer.errors import PeerUnreachable, TransferError, TransferQueueFull
from diptych.kvtransfer.flow import NO_FLOW, Flow
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import (
    InstanceId,
    LinkDown,
    LinkInfo,
    LinkUp,
    NoteReceived,
    OpDone,
    PageIndices,
    PageWrite,
    Transport,
    TransportEvent,
)
from diptych.v1 import rank_pb2

_FIRST_NAME: Final = 1 << 62  # of our operations: those of links without other ranks are the transport's own


class TensorParallelTransport:
    """Implements `PeerTransport` on rank 0, over its own transport and those of the other ranks."""

    def __init__(self, transport: Transport, layout: PoolLayout, log: RankLog | NoRanks) -> None:
        """`layout` is that of rank 0's pool."""
        self.instance_id = transport.instance_id
        self._transport = transport
        self._local = FanOut(transport, layout)
        self._ranked: set[InstanceId] = set()  # peers that were ever linked by more than one pair of ranks
        self._log = log
        self._links: dict[InstanceId, RankedLink] = {}
        self._operations: dict[int, Operation] = {}
        self._local_names: dict[int, int] = {}  # operation of rank 0's transport -> ours
        self._names = itertools.count(_FIRST_NAME)
        self._events: list[TransportEvent] = []
        self._epoll = select.epoll()
        for descriptor in (transport.fileno(), *log.descriptors()):
            self._epoll.register(descriptor, select.EPOLLIN)

    def connect(self, peer: InstanceId, metadata: bytes) -> None:
        if peer in self._links:
            return
        parts = ranks_of(metadata)
        if self._log.size == len(parts) == 1:
            self._transport.connect(peer, parts[0])
            return
        self._local.connect(peer, metadata)
        self._ranked.add(peer)
        self._links[peer] = RankedLink(peer)
        self._log.append(rank_pb2.RankEntry(connect=rank_pb2.ConnectPeer(peer=peer, metadata=metadata)))

    def disconnect(self, peer: InstanceId) -> None:
        if peer in self._links:
            self._close(peer, "disconnected")
        elif peer not in self._ranked:
            self._transport.disconnect(peer)

    def write_pages(self, peer: InstanceId, write: PageWrite, note: bytes = b"", flow: Flow = NO_FLOW) -> int:
        if peer not in self._ranked:
            return self._transport.write_pages(peer, write, note, flow)
        link = self._open_link(peer)
        local = self._local.write_pages(peer, write, b"", flow)  # may refuse; then nothing has happened
        operation = self._new_operation(link, self._log.size, note)
        self._local_names[local] = operation.name
        self._log.append(rank_pb2.RankEntry(copy=copy_to_wire(operation.name, peer, write, flow)))
        link.moving.add(operation.name)
        self._append(link, flow.stream, operation)
        return operation.name

    def send_note(self, peer: InstanceId, note: bytes, *, stream: int = 0, digest: int | None = None) -> int:
        if peer not in self._ranked:
            return self._transport.send_note(peer, note, stream=stream, digest=digest)
        link = self._open_link(peer)
        operation = self._new_operation(link, 0, note)
        operation.note_digest = digest
        self._append(link, stream, operation)
        self._advance(link, stream)
        return operation.name

    def digest_pages(self, pages: PageIndices) -> int:
        def entry(name: int) -> rank_pb2.RankEntry:
            return rank_pb2.RankEntry(digest_pages=rank_pb2.DigestOwnPages(operation=name, pages=page_bytes(pages)))

        return self._on_every_rank(self._transport.digest_pages(pages), entry)

    def lands_in_parts(self, peer: InstanceId) -> bool:
        return self._side(peer).lands_in_parts(peer)

    def unpack_pages(self, peer: InstanceId, pages: PageIndices) -> int:
        def entry(name: int) -> rank_pb2.RankEntry:
            wanted = rank_pb2.UnpackPages(operation=name, peer=peer, pages=page_bytes(pages))
            return rank_pb2.RankEntry(unpack=wanted)

        return self._on_every_rank(self._side(peer).unpack_pages(peer, pages), entry)

    def grant_pages(self, peer: InstanceId, pages: PageIndices) -> None:
        """On this rank: the others hear of a grant later than the peer does. No step may write into these any more."""
        self._log.finish_steps()
        self._side(peer).grant_pages(peer, pages)

    def poll(self) -> list[TransportEvent]:
        if self._log.size == 1 and not self._ranked:
            return self._transport.poll()
        own, said = self._local.poll(), self._log.events()
        for event in own:
            self._on_event(0, event)
        for other in said:
            self._on_event(other.rank, _from_wire(other))
        if own or said:
            self._settle()
        events, self._events = self._events, []
        return events

    def fileno(self) -> int:
        return self._epoll.fileno()

    def describe(self, peer: InstanceId) -> LinkInfo:
        return self._side(peer).describe(peer)

    def paths(self, peer: InstanceId) -> tuple[str, ...]:
        """Return those of rank 0. A rank that can't use the chosen one closes the link."""
        return self._side(peer).paths(peer)

    def use_path(self, peer: InstanceId, path: str) -> None:
        if peer not in self._ranked:
            self._transport.use_path(peer, path)
            return
        link = self._open_link(peer)
        if link.moving:
            raise TransferError("operations are open")
        self._local.use_path(peer, path)
        self._log.append(rank_pb2.RankEntry(use_path=rank_pb2.UsePath(peer=peer, path=path)))

    def writer_gone(self, peer: InstanceId) -> bool:
        answers = self._log.ask(rank_pb2.RankEntry(is_writer_gone=peer))
        return self._side(peer).writer_gone(peer) and all(answer.is_writer_gone for answer in answers)

    def close(self) -> None:
        self._epoll.close()
        self._transport.close()

    # what the ranks report

    def _on_event(self, rank: int, event: TransportEvent) -> None:
        match event:
            case LinkUp(peer) if peer in self._links:
                self._on_up(rank, peer)
            case LinkDown(peer, reason) if peer in self._links:
                self._on_down(rank, peer, reason)
            case NoteReceived(peer) if peer in self._links and len(self._links[peer].up) < self._log.size:
                self._links[peer].early.append(event)
            case OpDone(name, error, digest) if rank or name in self._local_names:
                self._on_part(name if rank else self._local_names.pop(name), error, digest)
            case _:
                self._events.append(event)

    def _on_up(self, rank: int, peer: InstanceId) -> None:
        link = self._links[peer]
        link.up.add(rank)
        if len(link.up) == self._log.size and link.reason is None:
            self._events += [LinkUp(peer), *link.early]

    def _on_down(self, rank: int, peer: InstanceId, reason: str) -> None:
        self._links[peer].down.add(rank)
        self._close(peer, f"rank {rank}: {reason}" if self._log.size > 1 else reason)

    def _on_part(self, name: int, error: str | None, digest: int | None) -> None:
        """A rank has done its part, or rank 0 has delivered the note."""
        operation = self._operations[name]
        operation.num_parts -= 1
        operation.error = operation.error or error
        operation.digest = sum_digests(operation.digest, digest)
        if operation.num_parts > 0:
            return
        if operation.link is not None:
            operation.link.moving.discard(name)
        if operation.link is not None and operation.is_queued:
            self._advance(operation.link, operation.stream)
        else:
            self._end(operation)

    # what follows

    def _settle(self) -> None:
        """Try again what was refused for want of room, and forget links that are down."""
        for peer, link in list(self._links.items()):
            for stream in list(link.streams):
                self._advance(link, stream)
            self._forget_if_down(peer, link)

    def _advance(self, link: RankedLink, name: int) -> None:
        """End the operations of a stream whose parts have all ended, and send their notes, in order."""
        stream = link.streams[name]
        while stream.queue and stream.queue[0].num_parts <= 0:
            try:
                self._complete(link.peer, name, stream, stream.queue[0])
            except TransferQueueFull:
                return  # completions make room, and bring us here again
            stream.queue.popleft()
        if stream.is_over:
            del link.streams[name]

    def _complete(self, peer: InstanceId, name: int, stream: Stream, operation: Operation) -> None:
        digest = sum_digests(stream.digest, operation.digest)
        operation.error = operation.error or stream.error
        if operation.error is None and operation.note:
            self._send(peer, name, operation, digest)
            stream.digest = None
        else:
            stream.digest = digest
            stream.error = operation.error if name else None
            self._end(operation)

    def _send(self, peer: InstanceId, name: int, operation: Operation, digest: int | None) -> None:
        carried = digest if operation.note_digest is None else operation.note_digest
        try:
            local = self._transport.send_note(peer, operation.note, stream=name, digest=carried)
        except TransferQueueFull:
            raise
        except TransferError as error:
            operation.error = str(error)
            self._end(operation)
        else:
            self._local_names[local] = operation.name
            operation.is_queued = False

    def _forget_if_down(self, peer: InstanceId, link: RankedLink) -> None:
        """A rank may refuse to move pages after its link went down: the last such answer is waited for."""
        if len(link.down) < self._log.size or link.moving:
            return
        assert link.reason is not None
        for operation in [operation for stream in link.streams.values() for operation in stream.queue]:
            operation.error = operation.error or link.reason
            self._end(operation)
        self._events.append(LinkDown(peer, link.reason))
        del self._links[peer]

    def _close(self, peer: InstanceId, reason: str) -> None:
        """Close a link on every rank; `LinkDown` follows when all have."""
        link = self._links[peer]
        if link.reason is None:
            link.reason = reason
            self._local.disconnect(peer)
            self._log.append(rank_pb2.RankEntry(disconnect=peer))

    def _end(self, operation: Operation) -> None:
        if self._operations.pop(operation.name, None) is not None:
            self._events.append(OpDone(operation.name, operation.error, None if operation.error else operation.digest))

    def _side(self, peer: InstanceId) -> Transport | FanOut:
        """Return what leads to the peer: this rank's links to its ranks, or the one link there is."""
        return self._local if peer in self._ranked else self._transport

    def _open_link(self, peer: InstanceId) -> RankedLink:
        link = self._links.get(peer)
        if link is None or len(link.up) < self._log.size or link.reason is not None:
            raise PeerUnreachable(f"no link to {peer:016x}")
        return link

    def _new_operation(self, link: RankedLink | None, num_parts: int, note: bytes = b"") -> Operation:
        operation = Operation(next(self._names), link, num_parts, note)
        self._operations[operation.name] = operation
        return operation

    def _on_every_rank(self, local: int, entry: Callable[[int], rank_pb2.RankEntry]) -> int:
        """Have the other ranks do what rank 0 has begun as `local`; return the name of the whole."""
        if self._log.size == 1:
            return local
        operation = self._new_operation(None, self._log.size)
        self._local_names[local] = operation.name
        self._log.append(entry(operation.name))
        return operation.name

    def _append(self, link: RankedLink, stream: int, operation: Operation) -> None:
        operation.stream, operation.is_queued = stream, True
        link.streams.setdefault(stream, Stream()).queue.append(operation)


def _from_wire(event: rank_pb2.RankEvent) -> TransportEvent:
    match event.WhichOneof("event"):
        case "link_up":
            return LinkUp(event.link_up)
        case "link_down":
            return LinkDown(event.link_down.peer, event.link_down.reason)
        case _:
            done = event.operation_done
            return OpDone(done.operation, done.error or None, done.digest if done.HasField("digest") else None)
