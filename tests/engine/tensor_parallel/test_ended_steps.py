"""When pages may be granted to peers, though another rank may still compute on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from ranked_model import RankedModel, Shape

from diptych.checkpoints.source import open_model
from diptych.engine.cache.host_tier import NO_COPIER
from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.ended_steps import RankSteps, tells_of_all
from diptych.engine.tensor_parallel.group import TensorParallelDraftModel, TensorParallelRunner
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker
from diptych.engine.tensor_parallel.transfers.transport import TensorParallelTransport
from diptych.engine.values.batch import DraftBatch, ForwardBatch, ForwardMode, SamplingBatch, StateMoves
from diptych.engine.values.kv_regions import pages_per_state
from diptych.kvtransfer.inproc import InprocNetwork
from diptych.v1 import rank_pb2

PEER = 7
PAGE, PAGE_SIZE = 3, 16
NONE = np.zeros(0, np.int64)


def step(num_sampled: int, written: tuple[int, ...] = (), pages: int = 1) -> ForwardBatch:
    """A chunk that fills `PAGE`, of a request whose state goes to pages that follow, if any of it is `written`."""
    places = np.arange(PAGE_SIZE)
    slots, to = np.array(written, np.int64), PAGE + 1 + np.arange(len(written) * pages, dtype=np.int32)
    moves = StateMoves(
        np.ones(1, np.int64), np.ones(1, np.int64), NONE, np.zeros((0, pages), np.int32), slots, to.reshape(-1, pages)
    )
    return ForwardBatch(
        ForwardMode.EXTEND,
        places + 5,
        places,
        PAGE * PAGE_SIZE + places,
        np.array([[PAGE]], np.int32),
        np.array([PAGE_SIZE]),
        np.array([PAGE_SIZE]),
        num_sampled=np.array([num_sampled]),
        states=moves,
    )


SAMPLED, UNSAMPLED, STATED = step(1), step(0), step(1, (1,))
UNFOLLOWED = replace(SAMPLED, is_followed=False)


@pytest.mark.parametrize(
    ("batch", "is_followed", "tells"),
    [
        (SAMPLED, False, True),
        (replace(SAMPLED, states=None), False, True),
        (UNSAMPLED, False, False),
        (STATED, False, False),
        (SAMPLED, True, False),
        (UNFOLLOWED, True, True),
        (replace(STATED, is_followed=False), True, False),
    ],
)
def test_a_result_tells_of_all_ranks_where_nothing_is_written_behind_the_last_sums(
    batch: ForwardBatch, is_followed: bool, tells: bool
) -> None:
    assert tells_of_all(batch, is_followed=is_followed) is tells


def test_a_rank_waits_for_no_step_that_was_begun_behind_those_asked_for() -> None:
    waited: list[int] = []
    steps = RankSteps()
    for number, batch in enumerate([UNSAMPLED, UNSAMPLED, SAMPLED, STATED, UNSAMPLED], 1):
        steps.begun(batch, lambda number=number: lambda: waited.append(number), is_followed=False)  # type: ignore[misc]
    steps.finish(4)
    assert waited == [4]


class Lead:
    """Rank 0's runner, with something that guesses for it or without."""

    draft_model: Any = None

    def logits(self, batch: Any) -> Any:
        return [0.5] * batch.num_sampled.sum()

    def sample(self, batch: Any, logits: Any, sampling: Any) -> Any:
        return lambda: "result"

    def draft(self, batch: Any) -> Any:
        return "guesses"


class Told:
    """What another rank needs of its model; it notes what it was told."""

    draft_model: Any = None

    def __init__(self) -> None:
        self.told: list[str] = []

    def logits(self, batch: object) -> None:
        self.told.append("step")

    def new_end(self) -> Callable[[], None]:
        return lambda: self.told.append("finish")

    def draft(self, batch: object) -> None:
        self.told.append("draft")


class Interrupted:
    """A batch that is interrupted while it is written down for other ranks."""

    def __init__(self, batch: ForwardBatch, by: Callable[[], object]) -> None:
        self._batch = batch
        self._by = by

    def __getattr__(self, name: str) -> Any:
        if name == "page_table":
            self._by()
        return getattr(self._batch, name)


class Ranks:
    def __init__(self, endpoint: str) -> None:
        self.log = RankLog(HostChannels(endpoint), 2)
        self.lead, self.other = Lead(), Told()
        self.runner: Any = TensorParallelRunner(self.lead, self.log)  # type: ignore[arg-type]
        self._rank = TpModelWorker(HostChannels(endpoint), 1)
        self._thread = ThreadPoolExecutor(1)

    def compute(self, batch: Any) -> None:
        self.runner.execute(batch, None)

    def draft(self) -> None:
        ones, table = np.ones(1, np.int64), np.zeros((1, 1), np.int32)
        model = TensorParallelDraftModel(self.lead, self.log)  # type: ignore[arg-type]
        model.draft(DraftBatch(ones, ones, table, ones, PAGE_SIZE))

    def asked(self) -> int:
        """Finish the steps so far; return how often the other rank was asked to, ever."""
        waiting = self._thread.submit(self.log.finish_steps)
        while not waiting.done():
            self._rank.apply_due(self.other, None, None)  # type: ignore[arg-type]
        waiting.result()
        return self.other.told.count("finish")

    def close(self) -> None:
        self.log.close()
        self._rank.close()
        self._thread.shutdown()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(f"ipc://{tmp_path}/log")
    yield made
    made.close()


def test_a_step_that_is_sampled_from_has_ended_everywhere(ranks: Ranks) -> None:
    assert ranks.asked() == 0
    ranks.compute(SAMPLED)
    assert ranks.asked() == 0


@pytest.mark.parametrize("quiet", [UNSAMPLED, STATED], ids=["unsampled", "with a state behind it"])
def test_ranks_are_waited_for_once_behind_steps_whose_results_say_nothing_of_them(
    ranks: Ranks, quiet: ForwardBatch
) -> None:
    ranks.compute(quiet)
    ranks.compute(quiet)
    assert [ranks.asked(), ranks.asked()] == [1, 1]
    ranks.compute(quiet)
    ranks.compute(SAMPLED)
    assert ranks.asked() == 1


def test_what_computes_behind_a_model_is_waited_for_until_it_has_guessed(ranks: Ranks) -> None:
    ranks.lead.draft_model, ranks.other.draft_model = ranks.lead, ranks.other
    ranks.compute(SAMPLED)
    assert ranks.asked() == 1
    ranks.compute(SAMPLED)
    ranks.draft()
    assert ranks.asked() == 1
    ranks.compute(UNFOLLOWED)
    assert ranks.asked() == 1


def test_a_step_that_runs_is_not_waited_for(ranks: Ranks) -> None:
    """What it writes is not free."""
    ranks.compute(SAMPLED)
    running = ranks.runner.logits(UNSAMPLED)
    assert ranks.asked() == 0
    ranks.runner.sample(UNSAMPLED, running, None)()
    assert ranks.asked() == 1


def test_the_result_of_a_step_says_nothing_of_one_begun_before_it_came(ranks: Ranks) -> None:
    logits, behind = ranks.runner.logits(SAMPLED), ranks.runner.logits(UNSAMPLED)
    ranks.runner.sample(SAMPLED, logits, None)()
    ranks.runner.sample(UNSAMPLED, behind, None)()
    assert ranks.asked() == 1


def test_a_grant_while_a_step_is_written_down_ends_no_step_that_the_other_ranks_have_yet_to_hear_of(
    ranks: Ranks,
) -> None:
    ranks.compute(Interrupted(UNSAMPLED, ranks.asked))
    ranks.asked()
    assert ranks.other.told[-2:] == ["step", "finish"]


class WatchedSocket:
    def __init__(self, socket: zmq.Socket[bytes], on_question: Callable[[], None]) -> None:
        self._socket = socket
        self._on_question = on_question

    def send(self, data: bytes, flags: int = 0) -> None:
        self._socket.send(data, flags)
        if rank_pb2.RankEntry.FromString(data).HasField("finish_steps"):
            self._on_question()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class WatchedChannels(HostChannels):
    """Those of rank 0, who is seen to ask whether steps have ended."""

    def __init__(self, endpoint: str, on_question: Callable[[], None]) -> None:
        super().__init__(endpoint)
        self._on_question = on_question

    def listen(self, kind: int, name: str) -> Any:
        return WatchedSocket(super().listen(kind, name), self._on_question)


class TwoRanks:
    """A real model on two ranks, of which rank 1 is held where it shall be late, and the pages of both."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.model = RankedModel(open_model(str(folder)), Shape(PAGE_SIZE, tp=2), 64)
        self.own, self.other = self.model._runners
        self.is_held, self.may_go = threading.Event(), threading.Event()
        self._is_asked_or_granted = threading.Event()
        self.log = RankLog(WatchedChannels(endpoint, self._is_asked_or_granted.set), 2)
        self._rank = TpModelWorker(HostChannels(endpoint), 1)
        engine, layout = InprocNetwork().transport(1), self.model.layouts[0]
        engine.allocate_pool(layout)
        self._transport = TensorParallelTransport(engine, layout, self.log)
        self._threads = ThreadPoolExecutor(2)
        self._serving = self._threads.submit(self._rank.run, self.other, None, NO_COPIER)

    def late(self, plain: Callable[..., None], is_it: Callable[..., bool] = lambda *_: True) -> Callable[..., None]:
        """Return what does the same, but where `is_it` only when rank 1 may go on."""

        def held(*arguments: Any) -> None:
            if is_it(*arguments):
                self.is_held.set()
                assert self.may_go.wait(60)
            plain(*arguments)

        return held

    def compute(self, batch: ForwardBatch) -> None:
        runner = TensorParallelRunner(self.own, self.log)
        nothing: Any = [np.zeros(batch.num_samples, kind) for kind in ("f4", "f4", "i8", "u8", "i8")]
        greedy = SamplingBatch(*nothing)
        runner.execute(batch, greedy)
        assert self.is_held.wait(60), "rank 0 is done, and rank 1 is at the step"

    def give(self, pages: list[int]) -> None:
        """Grant pages, of which the peer fills the other rank's part at once; let that go on meanwhile."""
        writing = self._threads.submit(self._grant_and_write, pages)
        assert self._is_asked_or_granted.wait(60)
        self.may_go.set()
        writing.result()

    def _grant_and_write(self, pages: list[int]) -> None:
        self._transport.grant_pages(PEER, np.array(pages))
        self.model.kv[pages, 1] = 0xAB
        self._is_asked_or_granted.set()

    def close(self) -> None:
        """Rank 1 ends what it was told before."""
        self.may_go.set()
        self.log.append(rank_pb2.RankEntry(shutdown=True))
        self._serving.result()
        self.log.close()
        self._rank.close()
        self._transport.close()
        self._threads.shutdown()


@contextmanager
def two_ranks(folder: Path, where: Path) -> Iterator[TwoRanks]:
    made = TwoRanks(folder, f"ipc://{where}/log")
    try:
        yield made
    finally:
        made.close()


def test_a_peer_writes_into_pages_of_an_unsampled_chunk_when_the_last_layer_of_all_ranks_has(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(tiny_folder, tmp_path) as ranks:
        attention, last = ranks.other.model.attention, ranks.model.source.config.num_layers - 1
        late = ranks.late(attention.attend, lambda qkv, layer, out: layer == last)
        monkeypatch.setattr(attention, "attend", late)
        ranks.compute(replace(UNSAMPLED, states=None))
        ranks.give([PAGE])
    assert (ranks.model.kv[PAGE, 1] == 0xAB).all(), "rank 1 has written over the peer's KV"
    assert (ranks.model.kv[PAGE, 0] != 0xFF).any(), "the step has written this page"


def test_a_peer_writes_into_pages_of_a_state_when_all_ranks_have_put_theirs_there(
    tiny_recurrent_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(tiny_recurrent_folder, tmp_path) as ranks:
        num_pages = pages_per_state(ranks.model.source.config, 2, "float32", ranks.model.layouts[0])
        pages = [PAGE + 1 + number for number in range(num_pages)]
        states: Any = ranks.other.model.states
        monkeypatch.setattr(states, "behind", ranks.late(states.behind))
        ranks.compute(step(1, (1,), num_pages))
        ranks.give(pages)
    assert (ranks.model.kv[pages, 1] == 0xAB).all(), "rank 1 has written over the peer's state"
    assert (ranks.model.kv[pages, 0] != 0xFF).any()
