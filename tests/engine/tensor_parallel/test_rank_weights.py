"""Weights of two ranks: both serve the same after each entry of the log, and what fails on one has failed on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from diptych.architectures.registry import FAMILIES
from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.errors import ConfigError, InvalidRequest
from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.engine.tensor_parallel.rank_model import RankModel
from diptych.engine.tensor_parallel.rank_tasks import LeadTasks, RankTasks
from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker
from diptych.engine.tensor_parallel.weight_change import Change
from diptych.engine.tensor_parallel.weight_sets import RankWeights, TensorParallelWeights, WeightLoader

T = TypeVar("T")


class Model:
    """A model of a rank, by the name of its weights; "" for none."""

    def __init__(self, name: str) -> None:
        self.name = name


class Rank:
    """How weights get onto one rank."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.fails = False
        self.lacks: list[str] = []
        self.wants_all = False
        self.weights = RankWeights("old", self.open("old"), WeightLoader(self.open, self.load, self.in_place, fits))

    def open(self, model: str) -> ModelSource:
        named = replace(self._config, model_id=model)
        return SimpleNamespace(config=named, weights_id=model, tensors=lambda: blank(named))

    def load(self, source: ModelSource) -> Model:
        self._check()
        return Model(source.config.model_id)

    def in_place(self, model: Model) -> Any:
        come = ""
        self.wants_all = False

        def take(source: ModelSource) -> None:
            nonlocal come
            model.name = ""
            self._check()
            come = source.config.model_id

        def release() -> None:
            model.name = ""

        def settle() -> None:
            model.name = come

        def want_all() -> None:
            self.wants_all = True

        return SimpleNamespace(
            take=take,
            release=release,
            want_all=want_all,
            lacking=lambda: self.lacks,
            settle=settle,
            runner=lambda: model,
        )

    def _check(self) -> None:
        if getattr(self, "fails", False):
            raise ConfigError("no memory is left")


def fits(source: ModelSource, served: ModelSource) -> None:
    return None


def blank(config: Any) -> Iterator[tuple[str, Any]]:
    for name, pieces in FAMILIES[config.architecture].placement(config):
        shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
        yield name, np.broadcast_to(np.float32(0), shape)


class Ranks:
    """Rank 0, and rank 1, which applies the log when told to."""

    def __init__(self, endpoint: str, config: Any) -> None:
        self.ranks = [Rank(config) for _ in range(2)]
        self.log = RankLog(HostChannels(endpoint), 2)
        self.lead = TensorParallelWeights(self.ranks[0].weights, LeadTasks(self.log))
        self.worker, self.tasks = TpModelWorker(HostChannels(endpoint), 1), RankTasks(HostChannels(endpoint), 1)
        model: Any = RankModel(self.ranks[1].weights, None, self.tasks)  # type: ignore[arg-type]
        self._model = model
        self._admin = ThreadPoolExecutor(1)

    def apply(self) -> None:
        self.worker.apply_due(self._model, None, None)  # type: ignore[arg-type]

    def do(self, work: Callable[[], T]) -> T:
        """Do what rank 0's admin thread does, while rank 1 looks into the log."""
        doing: Future[T] = self._admin.submit(work)
        while not doing.done():
            self.apply()
        return doing.result()

    def serve(self, name: str) -> bool:
        """Whether both come to serve these weights, and only these."""
        while self.ranks[1].weights.served.runner.name != name:
            self.apply()
        return bool(self.ranks[0].weights.served.runner.name == name)

    def close(self) -> None:
        self._admin.shutdown()
        self.tasks.close()
        self.worker.close()
        self.log.close()


@pytest.fixture
def ranks(tmp_path: Path, tiny_folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(f"ipc://{tmp_path}/scheduler", open_model(str(tiny_folder)).config)
    yield ranks
    ranks.close()


def test_what_was_loaded_beside_is_served_by_both_and_taken_back_by_both(ranks: Ranks) -> None:
    ranks.do(lambda: ranks.lead.prepare(Change("new")))
    assert ranks.serve("old")
    ranks.lead.switch()
    assert ranks.serve("new")
    ranks.lead.back()
    assert ranks.serve("old")
    ranks.lead.drop()
    with pytest.raises(ConfigError, match="no weights are loaded"):
        ranks.lead.switch()


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_rank_can_not_load_no_rank_has_loaded(ranks: Ranks, failing: int) -> None:
    ranks.ranks[failing].fails = True
    with pytest.raises(InvalidRequest, match="no memory is left"):
        ranks.do(lambda: ranks.lead.prepare(Change("new")))
    with pytest.raises(ConfigError, match="no weights are loaded"):
        ranks.lead.switch()
    assert ranks.serve("old")


@pytest.mark.parametrize("failing", [0, 1])
def test_if_one_rank_fails_in_place_no_rank_has_weights_until_all_have_others(ranks: Ranks, failing: int) -> None:
    ranks.ranks[failing].fails = True
    with pytest.raises(ConfigError, match="no memory is left"):
        ranks.do(lambda: ranks.lead.replace(Change("new")))
    assert ranks.serve("")
    while not all(rank.wants_all for rank in ranks.ranks):  # norms may be of either model
        ranks.apply()
    ranks.ranks[failing].fails = False
    assert ranks.do(lambda: ranks.lead.replace(Change("old"))) == []
    assert ranks.serve("old")


def test_what_any_rank_lacks_is_lacking_and_none_serves_before_it_has_come(ranks: Ranks) -> None:
    ranks.ranks[0].lacks, ranks.ranks[1].lacks = ["a", "c"], ["b", "c"]
    assert ranks.do(lambda: ranks.lead.replace(Change("new"))) == ["a", "b", "c"]
    ranks.ranks[0].lacks = []
    assert ranks.do(lambda: ranks.lead.replace(Change("new"))) == ["b", "c"]
    assert ranks.serve("")
    ranks.ranks[1].lacks = []
    assert ranks.do(lambda: ranks.lead.replace(Change("new"))) == []
    assert ranks.serve("new")


def test_weights_that_were_released_whole_keep_their_norms(ranks: Ranks) -> None:
    ranks.lead.release()
    assert ranks.serve("")
    assert not any(rank.wants_all for rank in ranks.ranks)
    assert ranks.do(lambda: ranks.lead.replace(Change("new"))) == []
    ranks.lead.release()
    assert ranks.serve("")
    assert not any(rank.wants_all for rank in ranks.ranks)
