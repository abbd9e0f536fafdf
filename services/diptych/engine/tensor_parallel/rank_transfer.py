"""The transfer engine of a rank other than 0, driven by the log. Its operations are named by rank 0."""

from __future__ import annotations

from collections import deque

from diptych.engine.tensor_parallel.log_codec import from_bytes
from diptych.kvtransfer.errors import TransferError, TransferQueueFull
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, Pool, Transport, TransportEvent
from diptych.v1 import rank_pb2


class RankTransfer:
    """Applies the entries that concern transfers, and tells what became of them."""

    def __init__(self, transport: Transport, pool: Pool) -> None:
        self._transport = transport
        self._pool = pool
        self._names: dict[int, int] = {}  # our operation -> rank 0's name of it
        self._waiting: deque[rank_pb2.CopyPages] = deque()  # until the transfer engine has room
        self._refused: list[rank_pb2.RankEvent] = []

    def fileno(self) -> int:
        return self._transport.fileno()

    def apply(self, entry: rank_pb2.RankEntry) -> rank_pb2.RankAnswer | None:
        """Apply an entry; return the answer to one that is a question."""
        match entry.WhichOneof("entry"):
            case "connect":
                self._connect(entry.connect)
            case "disconnect":
                self._transport.disconnect(entry.disconnect)
            case "copy":
                self._waiting.append(entry.copy)
                self._post_waiting()
            case "digest":
                return rank_pb2.RankAnswer(digest=self._pool.digest(from_bytes(entry.digest.pages)))
            case "is_writer_gone":
                return rank_pb2.RankAnswer(is_writer_gone=self._transport.writer_gone(entry.is_writer_gone))
        return None

    def poll(self) -> list[rank_pb2.RankEvent]:
        """Return what happened since the last call, without waiting."""
        events = [self._to_wire(event) for event in self._transport.poll()]
        self._post_waiting()
        refused, self._refused = self._refused, []
        return refused + events

    def _connect(self, connect: rank_pb2.ConnectPeer) -> None:
        try:
            self._transport.connect(connect.peer, connect.metadata)
        except TransferError as error:
            self._refused.append(_unlinked(connect.peer, str(error)))

    def _post_waiting(self) -> None:
        while self._waiting:
            copy = self._waiting[0]
            try:
                operation = self._transport.write_pages(copy.peer, from_bytes(copy.src), from_bytes(copy.dst))
            except TransferQueueFull:
                return  # completions make room, and bring us here again
            except TransferError as error:
                self._refused.append(_ended(copy.operation, str(error)))
            else:
                self._names[operation] = copy.operation
            self._waiting.popleft()

    def _to_wire(self, event: TransportEvent) -> rank_pb2.RankEvent:
        match event:
            case LinkUp(peer):
                return rank_pb2.RankEvent(link_up=peer)
            case LinkDown(peer, reason):
                return _unlinked(peer, reason)
            case OpDone(operation, error):
                return _ended(self._names.pop(operation), error or "")
            case NoteReceived():
                raise AssertionError("notes go from rank 0 to rank 0")


def _unlinked(peer: int, reason: str) -> rank_pb2.RankEvent:
    return rank_pb2.RankEvent(link_down=rank_pb2.LinkEnd(peer=peer, reason=reason))


def _ended(operation: int, error: str) -> rank_pb2.RankEvent:
    return rank_pb2.RankEvent(operation_done=rank_pb2.OperationEnd(operation=operation, error=error))
