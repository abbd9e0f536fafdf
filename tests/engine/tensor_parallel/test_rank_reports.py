"""When rank 0 hears what became of transfers on another rank, while steps keep coming."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import zmq

from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.rank_log import RankLog, page_bytes, round_to_wire, step_to_wire
from diptych.engine.tensor_parallel.tp_model_worker import RankTransfer, TpModelWorker
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.engine.values.rounds import NOTHING, Part, Round
from diptych.kvtransfer.transport import OpDone, TransportEvent
from diptych.v1 import rank_pb2

OPERATION, MOST_MS = 7, 5000
ONES = np.ones(1, np.int64)
BATCH = ForwardBatch(ForwardMode.DECODE, ONES, ONES, ONES, ONES[None].astype(np.int32), ONES, ONES, num_sampled=ONES)
OURS = rank_pb2.RankEntry(step=step_to_wire(BATCH))
OF_OTHERS = rank_pb2.RankEntry(round=round_to_wire(Round((NOTHING, Part(1, 1))), is_without_us=True))


class InstantTransport:
    """Ends at once what it is asked to. Its events wait until they are polled for."""

    layout = None  # of the pool, which nobody reads

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._events: list[TransportEvent] = []

    def fileno(self) -> int:
        return self._descriptor

    def digest_pages(self, pages: object) -> int:
        self._events.append(OpDone(1, None, 0))
        return 1

    def poll(self) -> Sequence[TransportEvent]:
        events, self._events = self._events, []
        return events


class NoCopies:
    def restored(self) -> Sequence[int]:
        return ()

    def descriptors(self) -> Sequence[int]:
        return ()


class Stage:
    """A model that notes of which operations rank 0 hears while it computes; its second step waits for one."""

    draft_model = None

    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._news = zmq.Poller()
        self._news.register(log.descriptors()[0], zmq.POLLIN)
        self.heard: list[list[int]] = []

    def logits(self, batch: object) -> None:
        events = self._log.events()
        while len(self.heard) == 1 and not events and self._news.poll(MOST_MS):
            events = self._log.events()
        self.heard.append([event.operation_done.operation for event in events])

    def new_end(self) -> Callable[[], None]:
        return lambda: None

    def apply(self, entry: rank_pb2.RankEntry) -> None:
        self.logits(entry)


@pytest.fixture
def descriptor() -> Iterator[int]:
    """One that nothing becomes of."""
    made = os.eventfd(0)
    yield made
    os.close(made)


@pytest.mark.parametrize("step", [OURS, OF_OTHERS], ids=["ours", "of others"])
def test_an_operation_that_ends_at_once_is_reported_behind_one_step_though_more_are_in_the_log(
    tmp_path: Path, descriptor: int, step: rank_pb2.RankEntry
) -> None:
    """Rank 0 appends a step before it computes it: a later stage finds the next one whenever it looks."""
    channels = HostChannels(f"ipc://{tmp_path}/scheduler")
    log, worker = RankLog(channels, 2), TpModelWorker(channels, 1)
    transport = InstantTransport(descriptor)
    stage, transfer = Stage(log), RankTransfer(transport, transport)  # type: ignore[arg-type]
    log.append(rank_pb2.RankEntry(digest_pages=rank_pb2.DigestOwnPages(operation=OPERATION, pages=page_bytes(ONES))))
    for _ in range(3):
        log.append(step)
    log.append(rank_pb2.RankEntry(shutdown=True))
    worker.run(stage, transfer, NoCopies())  # type: ignore[arg-type]
    worker.close()
    log.close()
    assert stage.heard == [[], [OPERATION], []]
