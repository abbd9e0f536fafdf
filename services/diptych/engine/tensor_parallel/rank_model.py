"""The model of a rank other than 0: its steps, and what the log changes of it. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from diptych.engine.lora.host import AdapterHost
from diptych.engine.tensor_parallel.rank_log import round_from_wire
from diptych.engine.tensor_parallel.rank_tasks import RankTasks
from diptych.engine.tensor_parallel.tp_model_worker import RankRunner
from diptych.engine.tensor_parallel.weight_change import change_from_wire, group_from_wire
from diptych.engine.tensor_parallel.weight_sets import RankWeights
from diptych.engine.values.batch import DraftModel, ForwardBatch, WaitForEnd
from diptych.engine.values.rounds import Round
from diptych.v1 import rank_pb2


class SharingRunner(RankRunner, Protocol):
    """What a rank needs of its model beside steps of its own."""

    def serve_others(self) -> None:
        """Take part in a step of schedulers that share our experts, without a token."""
        ...


R = TypeVar("R", bound=SharingRunner)
W = TypeVar("W")


class RankModel(Generic[R, W]):
    """Implements `ServedRank`. All calls from one thread; `tasks` has another."""

    def __init__(
        self,
        weights: RankWeights[R],
        adapters: AdapterHost[W],
        tasks: RankTasks,
        begin_round: Callable[[Round], None] = lambda common: None,
    ) -> None:
        """`begin_round` hears of each step that is common with schedulers that share experts, before it."""
        self._begin_round = begin_round
        self._weights = weights
        self._adapters = adapters
        self._tasks = tasks

    @property
    def draft_model(self) -> DraftModel | None:
        return self._weights.served.runner.draft_model

    def logits(self, batch: ForwardBatch) -> object:
        return self._weights.served.runner.logits(batch)

    def new_end(self) -> WaitForEnd:
        return self._weights.served.runner.new_end()

    def apply(self, entry: rank_pb2.RankEntry) -> None:
        match entry.WhichOneof("entry"):
            case "round":
                self._begin_round(round_from_wire(entry.round))
                if entry.round.is_without_us:
                    self._weights.served.runner.serve_others()
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
            case "switch_weights":
                self._weights.switch()
            case "switch_back":
                self._weights.back()
            case "drop_weights":
                self._weights.drop()
            case "release_weights":
                self._weights.release()

    def _prepare(self, wanted: rank_pb2.RankTask) -> None:
        self._tasks.start(wanted.task, lambda: self._done(wanted))

    def _done(self, wanted: rank_pb2.RankTask) -> tuple[Any, str]:
        """Do a task, in its thread; return what it has made, and its fingerprint."""
        match wanted.WhichOneof("work"):
            case "load_weights":
                self._weights.prepare(change_from_wire(wanted.load_weights))
            case "replace_weights":
                return None, "\n".join(self._weights.take(change_from_wire(wanted.replace_weights)))
            case "settle_weights":
                self._weights.settle()
            case "join_group":
                self._weights.join(group_from_wire(wanted.join_group))
            case "leave_group":
                self._weights.leave(wanted.leave_group)
            case _:
                found = self._adapters.read(Path(wanted.adapter))
                return found.weights, found.fingerprint
        return None, ""
