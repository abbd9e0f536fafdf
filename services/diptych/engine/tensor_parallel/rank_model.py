"""The model of a rank other than 0: its steps, and what the log changes of it. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from diptych.engine.lora.host import AdapterHost
from diptych.engine.tensor_parallel.rank_tasks import RankTasks
from diptych.engine.tensor_parallel.tp_model_worker import RankRunner
from diptych.engine.values.batch import DraftModel, ForwardBatch
from diptych.v1 import rank_pb2

W = TypeVar("W")


class RankModel(Generic[W]):
    """Implements `ServedRank`. All calls from one thread; `tasks` has another."""

    def __init__(self, runner: Callable[[], RankRunner], adapters: AdapterHost[W], tasks: RankTasks) -> None:
        self._runner = runner  # of the weights that are served now
        self._adapters = adapters
        self._tasks = tasks

    @property
    def draft_model(self) -> DraftModel | None:
        return self._runner().draft_model

    def logits(self, batch: ForwardBatch) -> object:
        return self._runner().logits(batch)

    def apply(self, entry: rank_pb2.RankEntry) -> None:
        match entry.WhichOneof("entry"):
            case "prepare":
                self._prepare(entry.prepare)
            case "forget":
                made = self._tasks.forget(entry.forget)
                if made is not None:
                    self._adapters.drop(made)
            case "place_adapter":
                self._adapters.install(entry.place_adapter.slot, self._tasks.made(entry.place_adapter.task))
            case "remove_adapter":
                self._adapters.remove(entry.remove_adapter)

    def _prepare(self, wanted: rank_pb2.RankTask) -> None:
        def read() -> tuple[Any, str]:
            found = self._adapters.read(Path(wanted.adapter))
            return found.weights, found.fingerprint

        self._tasks.start(wanted.task, read)
