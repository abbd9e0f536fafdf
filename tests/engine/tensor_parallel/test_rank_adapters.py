"""Adapters of two ranks: both have read it, or nobody has; both place it before the same step."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.common.errors import InternalError, InvalidRequest, Overloaded
from diptych.engine.lora.host import ReadAdapter
from diptych.engine.lora.registry import InvalidAdapter
from diptych.engine.tensor_parallel.adapters import TensorParallelAdapters
from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.rank_log import RankLog, step_to_wire
from diptych.engine.tensor_parallel.rank_model import RankModel
from diptych.engine.tensor_parallel.rank_tasks import LeadTasks, RankTasks
from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker
from diptych.engine.tensor_parallel.weight_sets import RankWeights, WeightLoader
from diptych.engine.values.batch import DraftModel, ForwardBatch, ForwardMode
from diptych.v1 import rank_pb2

FOLDER = Path("/adapters/ada")


class Host:
    """Implements `AdapterHost` and a runner: notes what is done, in order."""

    draft_model: DraftModel | None = None

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fails: Exception | None = None
        self.fingerprint = "same"
        self.done: list[Any] = []

    def read(self, folder: Path) -> ReadAdapter[str]:
        if self.fails is not None:
            raise self.fails
        return ReadAdapter(self.fingerprint, f"{folder.name} of rank {self.rank}")

    def install(self, slot: int, weights: str) -> None:
        self.done.append((slot, weights))

    def remove(self, slot: int) -> None:
        self.done.append(slot)

    def drop(self, weights: str) -> None:
        self.done.append(f"without {weights}")

    def new_end(self) -> Any:
        return lambda: None

    def serve_others(self) -> None:
        raise AssertionError("nobody shares experts")

    def logits(self, batch: ForwardBatch) -> object:
        assert batch.adapters is not None
        self.done.append(batch.adapters.tolist())
        return None


def _nothing(*arguments: object) -> Any:
    raise AssertionError("no weights are changed")


class Ranks:
    """Rank 0, and rank 1, which applies the log when told to."""

    def __init__(self, endpoint: str) -> None:
        self.hosts = [Host(rank) for rank in range(2)]
        self.log = RankLog(HostChannels(endpoint), 2)
        self.lead = TensorParallelAdapters(self.hosts[0], LeadTasks(self.log))
        self.worker, self.tasks = TpModelWorker(HostChannels(endpoint), 1), RankTasks(HostChannels(endpoint), 1)
        loader: WeightLoader[Host] = WeightLoader(_nothing, lambda source: self.hosts[1], _nothing, _nothing)
        self._model: RankModel[Host, str] = RankModel(RankWeights("", None, loader), self.hosts[1], self.tasks)  # type: ignore[arg-type]
        self._admin = ThreadPoolExecutor(1)

    def apply(self) -> None:
        self.worker.apply_due(self._model, None, None)  # type: ignore[arg-type]

    def read(self) -> ReadAdapter[Any]:
        """Read on rank 0's admin thread, while rank 1 looks into the log."""
        reading: Future[ReadAdapter[Any]] = self._admin.submit(self.lead.read, FOLDER)
        while not reading.done():
            self.apply()
        return reading.result()

    def applied(self, num_done: int) -> list[Any]:
        """Return what rank 1 has done when it has done so much."""
        while len(self.hosts[1].done) < num_done:
            self.apply()
        return self.hosts[1].done

    def close(self) -> None:
        self._admin.shutdown()
        self.tasks.close()
        self.worker.close()
        self.log.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(f"ipc://{tmp_path}/scheduler")
    yield ranks
    ranks.close()


def step(adapters: list[int]) -> rank_pb2.RankEntry:
    ones = np.ones(len(adapters), np.int64)
    table = np.zeros((len(adapters), 1), np.int32)
    batch = ForwardBatch(
        ForwardMode.DECODE, ones, ones, ones, table, ones, ones, num_sampled=ones, adapters=np.array(adapters)
    )
    return rank_pb2.RankEntry(step=step_to_wire(batch))


def test_what_one_rank_places_and_removes_every_rank_does_before_the_same_step(ranks: Ranks) -> None:
    read = ranks.read()
    assert read.fingerprint == "same"
    for slot in (3, 0):
        ranks.lead.install(slot, read.weights)
        ranks.log.append(step([slot, -1]))
    ranks.lead.remove(3)
    ranks.log.append(step([-1, 0]))
    ranks.lead.drop(read.weights)
    mine = "ada of rank 1"
    expected = [(3, mine), [3, -1], (0, mine), [0, -1], 3, [-1, 0], f"without {mine}"]
    assert ranks.applied(len(expected)) == expected
    assert ranks.hosts[0].done == [(3, "ada of rank 0"), (0, "ada of rank 0"), 3, "without ada of rank 0"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (InvalidAdapter("it has rank 65"), InvalidRequest),
        (Overloaded("no GPU memory is left"), Overloaded),
        (RuntimeError("a bug"), InternalError),
    ],
)
def test_an_adapter_that_one_rank_refuses_nobody_keeps(
    ranks: Ranks, failing: int, error: Exception, raised: type[Exception]
) -> None:
    ranks.hosts[failing].fails = error
    with pytest.raises(raised if failing else type(error), match=("rank 1: " if failing else "") + ".*" + str(error)):
        ranks.read()
    ranks.hosts[failing].fails = None
    ranks.lead.install(1, ranks.read().weights)
    kept = [(1, "ada of rank 1")]
    assert ranks.applied(1 if failing else 2) == (kept if failing else ["without ada of rank 1", *kept])


def test_a_folder_that_changes_between_two_ranks_is_refused(ranks: Ranks) -> None:
    ranks.hosts[1].fingerprint = "other"
    with pytest.raises(InvalidRequest, match="has changed while it was read"):
        ranks.read()
    assert ranks.applied(1) == ["without ada of rank 1"]
