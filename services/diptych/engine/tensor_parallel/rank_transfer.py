"""The transfer engine of a rank other than 0, driven by the log. Its operations are named by rank 0."""

from __future__ import annotations

import logging
from collections import deque

from diptych.engine.tensor_parallel.fan_out import FanOut
from diptych.engine.tensor_parallel.log_codec import flow_from_wire, from_bytes, write_from_wire
from diptych.kvtransfer.errors import TransferError, TransferQueueFull
from diptych.kvtransfer.transport import (
    LinkDown,
    LinkUp,
    NoteReceived,
    OpDone,
    ProbePages,
    Transport,
    TransportEvent,
)
from diptych.v1 import rank_pb2

logger = logging.getLogger(__name__)

Posted = rank_pb2.CopyPages | rank_pb2.DigestOwnPages | rank_pb2.UnpackPages


class RankTransfer:
    """Applies the entries that concern transfers, and tells what became of them."""

    def __init__(self, transport: Transport, pool: ProbePages) -> None:
        self._transport = transport
        self._peers = FanOut(transport, pool.layout)
        self._pool = pool
        self._names: dict[int, int] = {}  # our operation -> rank 0's name of it
        self._waiting: deque[Posted] = deque()  # until the transfer engine has room
        self._refused: list[rank_pb2.RankEvent] = []

    def fileno(self) -> int:
        return self._transport.fileno()

    def apply(self, entry: rank_pb2.RankEntry) -> rank_pb2.RankAnswer | None:
        """Apply an entry; return the answer to one that is a question."""
        match entry.WhichOneof("entry"):
            case "connect":
                self._connect(entry.connect)
            case "disconnect":
                self._peers.disconnect(entry.disconnect)
            case "copy":
                self._waiting.append(entry.copy)
                self._post_waiting()
            case "digest_pages":
                self._waiting.append(entry.digest_pages)
                self._post_waiting()
            case "unpack":
                self._waiting.append(entry.unpack)
                self._post_waiting()
            case "use_path":
                self._use_path(entry.use_path)
            case "fill_probe":
                self._pool.fill_pattern(entry.fill_probe)
            case "is_writer_gone":
                return rank_pb2.RankAnswer(is_writer_gone=self._peers.writer_gone(entry.is_writer_gone))
        return None

    def poll(self) -> list[rank_pb2.RankEvent]:
        """Return what happened since the last call, without waiting."""
        events = [self._to_wire(event) for event in self._peers.poll()]
        self._post_waiting()
        refused, self._refused = self._refused, []
        return refused + events

    def _connect(self, connect: rank_pb2.ConnectPeer) -> None:
        try:
            self._peers.connect(connect.peer, connect.metadata)
        except TransferError as error:
            self._refused.append(_unlinked(connect.peer, str(error)))

    def _use_path(self, choice: rank_pb2.UsePath) -> None:
        try:
            self._peers.use_path(choice.peer, choice.path)
        except TransferError as error:
            logger.error("closing the link to %016x: %s", choice.peer, error)
            self._peers.disconnect(choice.peer)

    def _post_waiting(self) -> None:
        while self._waiting:
            wanted = self._waiting[0]
            try:
                self._names[self._post(wanted)] = wanted.operation
            except TransferQueueFull:
                return  # completions make room, and bring us here again
            except TransferError as error:
                self._refused.append(_ended(wanted.operation, str(error)))
            self._waiting.popleft()

    def _post(self, wanted: Posted) -> int:
        if isinstance(wanted, rank_pb2.UnpackPages):
            return self._peers.unpack_pages(wanted.peer, from_bytes(wanted.pages))
        if isinstance(wanted, rank_pb2.DigestOwnPages):
            return self._transport.digest_pages(from_bytes(wanted.pages))
        return self._peers.write_pages(wanted.peer, write_from_wire(wanted), flow=flow_from_wire(wanted))

    def _to_wire(self, event: TransportEvent) -> rank_pb2.RankEvent:
        match event:
            case LinkUp(peer):
                return rank_pb2.RankEvent(link_up=peer)
            case LinkDown(peer, reason):
                return _unlinked(peer, reason)
            case OpDone(operation, error, digest):
                return _ended(self._names.pop(operation), error or "", digest)
            case NoteReceived():
                raise AssertionError("notes go from rank 0 to rank 0")


def _unlinked(peer: int, reason: str) -> rank_pb2.RankEvent:
    return rank_pb2.RankEvent(link_down=rank_pb2.LinkEnd(peer=peer, reason=reason))


def _ended(operation: int, error: str, digest: int | None = None) -> rank_pb2.RankEvent:
    return rank_pb2.RankEvent(
        operation_done=rank_pb2.OperationEnd(operation=operation, error=error, digest=digest),
    )
