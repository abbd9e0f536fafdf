"""A rank other than 0: applies the log of rank 0 to its part of the model and of the KV pool. It decides nothing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import zmq

from diptych.common.arrays import I32
from diptych.engine.cache.host_tier import PageCopier
from diptych.engine.tensor_parallel.channels import Reaching
from diptych.engine.tensor_parallel.ended_steps import RankSteps
from diptych.engine.tensor_parallel.rank_log import (
    EVENTS,
    RESTORES,
    answers_of,
    draft_from_wire,
    flow_from_wire,
    from_bytes,
    log_of,
    step_from_wire,
    write_from_wire,
)
from diptych.engine.tensor_parallel.transfers.fan_out import FanOut
from diptych.engine.values.batch import DraftModel, ForwardBatch, WaitForEnd
from diptych.kvtransfer.errors import TransferError, TransferQueueFull
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, ProbePages, Transport, TransportEvent
from diptych.v1 import rank_pb2

logger = logging.getLogger(__name__)

LAST_ANSWER_MS: Final = 1000  # that it may take to leave
OF_MODEL: Final = (
    *("prepare", "forget", "place_adapter", "remove_adapter"),
    *("switch_weights", "switch_back", "drop_weights", "release_weights", "round"),
)
Posted = rank_pb2.CopyPages | rank_pb2.DigestOwnPages | rank_pb2.UnpackPages


class RankRunner(Protocol):
    """What a rank needs of its model."""

    @property
    def draft_model(self) -> DraftModel | None:
        """What guesses for it, if anything does."""
        ...

    def logits(self, batch: ForwardBatch) -> object:
        """Take part in the step; the logits are rank 0's."""
        ...

    def new_end(self) -> WaitForEnd:
        """Return what waits for the steps so far."""
        ...


class ServedRank(RankRunner, Protocol):
    """The same, and what the log changes of it."""

    def apply(self, entry: rank_pb2.RankEntry) -> None:
        """Apply one of the entries `OF_MODEL`, between two steps."""
        ...


class RankMedium(Protocol):
    """Keeps a rank's part of pages for longer than a process lives, as rank 0 says."""

    @property
    def wait_ms(self) -> int | None:
        """How long it may take until `ended` is called again."""
        ...

    def apply(self, entry: rank_pb2.RankEntry) -> bool:
        """Apply an entry that is about this medium; return whether it is."""
        ...

    def ended(self) -> Sequence[rank_pb2.LoadEnd]:
        """Return which loads have ended since the last call, and how."""
        ...

    def descriptors(self) -> Sequence[int]: ...

    def close(self) -> None: ...


class TpModelWorker:
    """One rank: its channels to rank 0, and the loop."""

    def __init__(self, channels: Reaching, rank: int) -> None:
        self._rank = rank
        self._channels = channels
        self._steps = RankSteps()
        self._log = channels.connect(zmq.PAIR, log_of(rank))
        self._answers = channels.connect(zmq.PUSH, answers_of(rank))
        self._events = channels.connect(zmq.PUSH, EVENTS)
        self._restores = channels.connect(zmq.PUSH, RESTORES)

    def report_loaded_model(self) -> None:
        """Answer that this rank is ready, once it can be told what to do and can tell of it."""
        self._wait_until_connected()
        self.answer(rank_pb2.RankAnswer(is_loaded=True))

    def answer(self, answer: rank_pb2.RankAnswer) -> None:
        self._answers.send(answer.SerializeToString())

    def meeting(self) -> rank_pb2.Meeting:
        """Wait for the first entry in a group over several nodes: where its ranks meet.

        Raises `Unavailable` where there is no way to rank 0.
        """
        self._wait_until_connected()
        entry = rank_pb2.RankEntry.FromString(self._log.recv())
        assert entry.HasField("meet")
        return entry.meet

    def store(self) -> rank_pb2.OpenStore:
        """Wait for the next entry where pages are kept in a store; return what rank 0 says of it."""
        entry = rank_pb2.RankEntry.FromString(self._log.recv())
        assert entry.HasField("open_store")
        return entry.open_store

    def files_number(self) -> int:
        """Wait for the next entry where pages are kept in files; return the number of their folder."""
        entry = rank_pb2.RankEntry.FromString(self._log.recv())
        assert entry.HasField("open_files")
        return entry.open_files

    def run(
        self,
        runner: ServedRank,
        transfer: RankTransfer | None,
        host_pages: PageCopier,
        lasting: Sequence[RankMedium] = (),
    ) -> None:
        """Apply entries until the last. `transfer` is None without peers; `lasting`: files and a store."""
        poller = zmq.Poller()
        poller.register(self._log, zmq.POLLIN)
        if transfer is not None:
            poller.register(transfer.fileno(), zmq.POLLIN)
        for descriptor in (*host_pages.descriptors(), *(one for each in lasting for one in each.descriptors())):
            poller.register(descriptor, zmq.POLLIN)
        while not self.apply_due(runner, transfer, host_pages, lasting):
            if transfer is not None:
                self.report(transfer)
            self.report_restored(host_pages)
            for each in lasting:
                self.report_loaded(each)
            poller.poll(min((ms for each in lasting if (ms := each.wait_ms) is not None), default=None))

    def apply_due(
        self,
        runner: ServedRank,
        transfer: RankTransfer | None,
        host_pages: PageCopier,
        lasting: Sequence[RankMedium] = (),
    ) -> bool:
        """Apply what is in the log as far as the next step, without waiting; return whether its end was reached.

        Rank 0 appends a step before it computes it, so that a stage behind it always finds another while a prompt is
        computed: what ended meanwhile is told between two.
        """
        for entry in self._due():
            if entry.HasField("shutdown"):
                self.answer(rank_pb2.RankAnswer(has_ended=True))
                self._channels.end()
                return True
            if not any(each.apply(entry) for each in lasting):
                self._apply(entry, runner, transfer, host_pages)
            if entry.HasField("step") or entry.round.is_without_us:
                return False
        return False

    def report(self, transfer: RankTransfer) -> None:
        """Tell rank 0 what became of transfers."""
        for event in transfer.poll():
            event.rank = self._rank
            self._events.send(event.SerializeToString())

    def report_restored(self, host_pages: PageCopier) -> None:
        """Tell rank 0 which restores have ended here."""
        for number in host_pages.restored():
            self._restores.send(rank_pb2.RankEvent(rank=self._rank, restored=number).SerializeToString())

    def report_loaded(self, medium: RankMedium) -> None:
        """Tell rank 0 which loads from files or a store have ended here."""
        for end in medium.ended():
            self._restores.send(rank_pb2.RankEvent(rank=self._rank, loaded=end).SerializeToString())

    def close(self) -> None:
        self._answers.close(linger=LAST_ANSWER_MS)
        for socket in (self._log, self._events, self._restores):
            socket.close(linger=0)

    def _wait_until_connected(self) -> None:
        self._channels.wait_until_connected(self._rank, (self._log, self._answers, self._events, self._restores))

    def _due(self) -> Iterator[rank_pb2.RankEntry]:
        """Yield what is in the log, without waiting."""
        while True:
            try:
                yield rank_pb2.RankEntry.FromString(self._log.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def _apply(
        self, entry: rank_pb2.RankEntry, runner: ServedRank, transfer: RankTransfer | None, host_pages: PageCopier
    ) -> None:
        match entry.WhichOneof("entry"):
            case "step":
                batch = step_from_wire(entry.step)
                runner.logits(batch)
                self._steps.begun(batch, runner.new_end, is_followed=runner.draft_model is not None)
            case "draft":
                assert runner.draft_model is not None, "rank 0 has a draft model"
                runner.draft_model.draft(draft_from_wire(entry.draft))
            case "put_row":
                assert runner.draft_model is not None, "rank 0 has a draft model"
                runner.draft_model.put_row(entry.put_row.slot, entry.put_row.row)
            case "get_row":
                assert runner.draft_model is not None, "rank 0 has a draft model"
                runner.draft_model.row(entry.get_row)
            case "save":
                host_pages.save(*_host_copy(entry.save))
            case "finish_saves":
                host_pages.finish_saves()
                self.answer(rank_pb2.RankAnswer(is_saved=True))
            case "finish_steps":
                self._steps.finish(entry.finish_steps)
                self.answer(rank_pb2.RankAnswer(has_finished=True))
            case "restore":
                pages, slots = _host_copy(entry.restore)
                host_pages.restore(entry.restore.number, slots, pages)
            case name if name in OF_MODEL:
                runner.apply(entry)
            case _:
                assert transfer is not None, "an engine without peers moves no pages"
                answer = transfer.apply(entry)
                if answer is not None:
                    self.answer(answer)


def _host_copy(copy: rank_pb2.HostCopy) -> tuple[I32, I32]:
    """Return pages and slots."""
    return from_bytes(copy.pages).astype(np.int32), from_bytes(copy.slots).astype(np.int32)


class RankTransfer:
    """The transfer engine of a rank, driven by the entries that concern transfers. Rank 0 names its operations."""

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
            case "copy" | "digest_pages" | "unpack" as name:
                self._waiting.append(getattr(entry, name))
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
    return rank_pb2.RankEvent(operation_done=rank_pb2.OperationEnd(operation=operation, error=error, digest=digest))
