"""A rank other than 0: applies the log of rank 0 to its part of the model and of the KV pool. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import zmq

from diptych.common.arrays import I32
from diptych.engine.cache.host_tier import PageCopier
from diptych.engine.tensor_parallel.log_codec import from_bytes, step_from_wire
from diptych.engine.tensor_parallel.rank_log import events_endpoint, rank_endpoint
from diptych.engine.tensor_parallel.rank_transfer import RankTransfer
from diptych.engine.values.batch import ForwardBatch
from diptych.v1 import rank_pb2


class RankRunner(Protocol):
    """What a rank needs of its model."""

    def logits(self, batch: ForwardBatch) -> object:
        """Take part in the step; the logits are rank 0's."""
        ...


class TpModelWorker:
    """One rank: its channels to rank 0, and the loop."""

    def __init__(self, endpoint: str, rank: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._rank = rank
        self._log = _connect(context, zmq.PAIR, rank_endpoint(endpoint, rank))
        self._events = _connect(context, zmq.PUSH, events_endpoint(endpoint))

    def answer(self, answer: rank_pb2.RankAnswer) -> None:
        self._log.send(answer.SerializeToString())

    def run(self, runner: RankRunner, transfer: RankTransfer | None, host_pages: PageCopier) -> None:
        """Apply entries until the last. `transfer` is None for an engine without peers."""
        poller = zmq.Poller()
        poller.register(self._log, zmq.POLLIN)
        if transfer is not None:
            poller.register(transfer.fileno(), zmq.POLLIN)
        while not self.apply_due(runner, transfer, host_pages):
            if transfer is not None:
                self.report(transfer)
            poller.poll()

    def apply_due(self, runner: RankRunner, transfer: RankTransfer | None, host_pages: PageCopier) -> bool:
        """Apply what is in the log, without waiting; return whether its end was reached."""
        for entry in self._due():
            if entry.HasField("shutdown"):
                return True
            self._apply(entry, runner, transfer, host_pages)
        return False

    def report(self, transfer: RankTransfer) -> None:
        """Tell rank 0 what became of transfers."""
        for event in transfer.poll():
            event.rank = self._rank
            self._events.send(event.SerializeToString())

    def close(self) -> None:
        self._log.close(linger=0)
        self._events.close(linger=0)

    def _due(self) -> Iterator[rank_pb2.RankEntry]:
        """Yield what is in the log, without waiting."""
        while True:
            try:
                yield rank_pb2.RankEntry.FromString(self._log.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def _apply(
        self, entry: rank_pb2.RankEntry, runner: RankRunner, transfer: RankTransfer | None, host_pages: PageCopier
    ) -> None:
        match entry.WhichOneof("entry"):
            case "step":
                runner.logits(step_from_wire(entry.step))
            case "save":
                host_pages.save(*_host_copy(entry.save))
                self.answer(rank_pb2.RankAnswer(is_saved=True))
            case "restore":
                pages, slots = _host_copy(entry.restore)
                host_pages.restore(slots, pages)
            case _:
                assert transfer is not None, "an engine without peers moves no pages"
                answer = transfer.apply(entry)
                if answer is not None:
                    self.answer(answer)


def _host_copy(copy: rank_pb2.HostCopy) -> tuple[I32, I32]:
    """Return pages and slots."""
    return from_bytes(copy.pages).astype(np.int32), from_bytes(copy.slots).astype(np.int32)


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set_hwm(0)
    socket.connect(endpoint)
    return socket
