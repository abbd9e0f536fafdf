"""Adapters of all ranks: what rank 0 reads, every rank reads; what it places or removes, all do before the same step.

A rank reads in a thread, as rank 0 does, so no step waits for it. An adapter is read when every rank has read it, and
found the same: if one refuses, the others forget what they have read, and the caller hears of the one that refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from diptych.common.errors import InvalidRequest
from diptych.engine.lora.host import AdapterHost, ReadAdapter
from diptych.engine.tensor_parallel.rank_tasks import LeadTasks
from diptych.v1 import rank_pb2

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class RankedWeights(Generic[W]):
    """An adapter's weights on all ranks."""

    own: W
    task: int  # by which the others know theirs


class TensorParallelAdapters(Generic[W]):
    """Implements `AdapterHost` on rank 0, over its own part."""

    def __init__(self, own: AdapterHost[W], tasks: LeadTasks) -> None:
        self._own = own
        self._tasks = tasks

    def read(self, folder: Path) -> ReadAdapter[RankedWeights[W]]:
        wanted = rank_pb2.RankTask(adapter=str(folder))
        done = self._tasks.run(wanted, lambda: self._own.read(folder))
        if any(end.fingerprint != done.own.fingerprint for end in done.ends):
            self._tasks.forget(done.task)
            raise InvalidRequest(f"{folder} has changed while it was read: load it again")
        return ReadAdapter(done.own.fingerprint, RankedWeights(done.own.weights, done.task))

    def install(self, slot: int, weights: RankedWeights[W]) -> None:
        place = rank_pb2.PlaceAdapter(task=weights.task, slot=slot)
        self._tasks.log.append(rank_pb2.RankEntry(place_adapter=place))
        self._own.install(slot, weights.own)

    def remove(self, slot: int) -> None:
        self._tasks.log.append(rank_pb2.RankEntry(remove_adapter=slot))
        self._own.remove(slot)

    def drop(self, weights: RankedWeights[W]) -> None:
        self._tasks.forget(weights.task)
        self._own.drop(weights.own)
