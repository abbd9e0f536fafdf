"""What rank 0 does on behalf of its group: alone nothing, or as the lead of other ranks.

The lead wraps what touches weights or KV, so that each such act is an entry of the log before it is done here.

What the runner of rank 0 computes, it first tells the other ranks to compute, which do not sample. In the host tier of
all ranks, each copies its own part of a page.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from diptych.common.arrays import I64
from diptych.engine.cache.host_tier import PageCopier
from diptych.engine.cache.tier import Slots
from diptych.engine.lora.host import AdapterHost
from diptych.engine.tensor_parallel.adapters import TensorParallelAdapters
from diptych.engine.tensor_parallel.ended_steps import FollowedRunner, tells_of_all
from diptych.engine.tensor_parallel.parts.ranked_files import RankedFiles
from diptych.engine.tensor_parallel.parts.ranked_objects import RankedObjects
from diptych.engine.tensor_parallel.rank_log import (
    NoRanks,
    RankLog,
    draft_to_wire,
    page_bytes,
    round_to_wire,
    step_to_wire,
)
from diptych.engine.tensor_parallel.rank_tasks import LeadTasks
from diptych.engine.tensor_parallel.transfers.ranked_link import ranked_metadata
from diptych.engine.tensor_parallel.transfers.transport import TensorParallelTransport
from diptych.engine.tensor_parallel.weight_sets import RankWeights, TensorParallelWeights, WeightSets
from diptych.engine.tiers.medium import Medium
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.tiers.page_objects import PageObjects
from diptych.engine.tiers.shared_tier import RunMedium
from diptych.engine.values.batch import (
    DraftBatch,
    DraftModel,
    ForwardBatch,
    OverlapRunner,
    SamplingBatch,
    StepResult,
    WaitForResult,
)
from diptych.engine.values.rounds import Round
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.ownership import Pages
from diptych.kvtransfer.transport import PeerTransport, ProbePages, Transport
from diptych.v1 import rank_pb2

R = TypeVar("R")

if TYPE_CHECKING:  # needs torch
    from diptych.engine.tensor_parallel.communicator import TorchCommunicator


class SingleRank:
    """The ranks of a scheduler that has one."""

    def metadata(self, own: bytes) -> bytes:
        return ranked_metadata([own])

    def lead_transport(self, transport: Transport, layout: PoolLayout) -> PeerTransport:
        return TensorParallelTransport(transport, layout, NoRanks())  # a peer may have several

    def lead_pool(self, pool: ProbePages) -> ProbePages:
        return pool

    def lead_copier(self, copier: PageCopier) -> PageCopier:
        return copier

    def lead_files(self, files: PageFiles) -> Medium:
        return files

    def lead_objects(self, objects: PageObjects) -> RunMedium:
        return objects

    def lead_runner(self, runner: FollowedRunner) -> OverlapRunner:
        return runner

    def lead_round(self, common: Round, *, is_without_us: bool) -> None:
        pass

    def lead_draft_model(self, model: DraftModel) -> DraftModel:
        return model

    def lead_adapters(self, adapters: AdapterHost[Any]) -> AdapterHost[Any]:
        return adapters

    def lead_weights(self, weights: RankWeights[R]) -> WeightSets[R]:
        return weights

    def leading(self, runner: FollowedRunner) -> OverlapRunner:
        return runner

    def close(self) -> None:
        pass


class LeadRank:
    """The ranks of a scheduler that has several."""

    def __init__(self, log: RankLog, join: Callable[[], TorchCommunicator]) -> None:
        """Wait until every rank is here, then `join` them."""
        self._log = log
        self._tasks = LeadTasks(self._log)
        self._communicator = join()

    def metadata(self, own: bytes) -> bytes:
        """Return what peers need to connect to all ranks. Once: waits for theirs."""
        return ranked_metadata([own, *(answer.engine_metadata for answer in self._log.answers())])

    def lead_transport(self, transport: Transport, layout: PoolLayout) -> PeerTransport:
        """Show the links of all ranks as one. `layout` is that of rank 0's part of the pool."""
        return TensorParallelTransport(transport, layout, self._log)

    def lead_pool(self, pool: ProbePages) -> ProbePages:
        return TensorParallelPages(pool, self._log)

    def lead_copier(self, copier: PageCopier) -> PageCopier:
        return TensorParallelCopier(copier, self._log)

    def lead_files(self, files: PageFiles) -> Medium:
        """Have every rank open its part."""
        return RankedFiles(files, self._log)

    def lead_objects(self, objects: PageObjects) -> RunMedium:
        """The same of a store."""
        return RankedObjects(objects, self._log)

    def lead_runner(self, runner: FollowedRunner) -> OverlapRunner:
        """Wait until every rank has loaded its part."""
        assert all(answer.is_loaded for answer in self._log.answers())
        return self.leading(runner)

    def lead_round(self, common: Round, *, is_without_us: bool) -> None:
        """Tell every rank how large its next step is elsewhere; see `rounds`."""
        self._log.append(rank_pb2.RankEntry(round=round_to_wire(common, is_without_us=is_without_us)))

    def lead_draft_model(self, model: DraftModel) -> DraftModel:
        leading = TensorParallelDraftModel if self._communicator.stages is None else PipelineDraftModel
        return leading(model, self._log)

    def lead_adapters(self, adapters: AdapterHost[Any]) -> AdapterHost[Any]:
        return TensorParallelAdapters(adapters, self._tasks)

    def lead_weights(self, weights: RankWeights[R]) -> WeightSets[R]:
        return TensorParallelWeights(weights, self._tasks)

    def leading(self, runner: FollowedRunner) -> OverlapRunner:
        """Return what computes by `runner` here, and by theirs on the other ranks."""
        return TensorParallelRunner(runner, self._log)

    def close(self) -> None:
        self._log.close()
        self._communicator.close()


RankGroup = SingleRank | LeadRank  # as the composition root of a scheduler needs them


class TensorParallelCopier:
    """Implements `PageCopier` on rank 0: each rank copies its part, and a restore ends with the slowest."""

    def __init__(self, copier: PageCopier, log: RankLog) -> None:
        self._copier = copier
        self._log = log
        self._has_saved = False  # since the last `finish_saves`
        self._parts: Counter[int] = Counter()  # by restore on its way: the ranks that have ended it

    def save(self, pages: Pages, slots: Slots) -> None:
        self._log.append(rank_pb2.RankEntry(save=_host_copy(pages, slots)))
        self._copier.save(pages, slots)
        self._has_saved = True

    def finish_saves(self) -> None:
        """Return when every rank has read: peers may write into the pages next."""
        if self._has_saved:
            self._log.append(rank_pb2.RankEntry(finish_saves=True))
            self._copier.finish_saves()
            self._log.answers()
            self._has_saved = False

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        self._log.append(rank_pb2.RankEntry(restore=_host_copy(pages, slots, number)))
        return self._copier.restore(number, slots, pages)

    def restored(self) -> Sequence[int]:
        """Return which restores have ended on every rank."""
        self._parts.update((*self._copier.restored(), *self._log.restored()))
        ended = [number for number, num_ranks in self._parts.items() if num_ranks == self._log.size]
        for number in ended:
            del self._parts[number]
        return ended

    def descriptors(self) -> Sequence[int]:
        return (*self._copier.descriptors(), *self._log.restore_descriptors())

    def close(self) -> None:
        self._copier.close()


def _host_copy(pages: Pages, slots: Slots, number: int = 0) -> rank_pb2.HostCopy:
    return rank_pb2.HostCopy(pages=page_bytes(pages), slots=page_bytes(slots), number=number)


class TensorParallelPages:
    """Implements `ProbePages` on rank 0: every rank has them at the same place."""

    def __init__(self, pages: ProbePages, log: RankLog) -> None:
        self._pages = pages
        self._log = log
        self.layout, self.probe_pages, self.pattern_pages = pages.layout, pages.probe_pages, pages.pattern_pages

    def fill_pattern(self, seed: int) -> None:
        """Every rank fills its own, before anything that comes later."""
        self._log.append(rank_pb2.RankEntry(fill_probe=seed))
        self._pages.fill_pattern(seed)


class TensorParallelRunner:
    """Implements `OverlapRunner` over rank 0's own runner, and tells the log what its results say of all ranks."""

    def __init__(self, runner: FollowedRunner, log: RankLog) -> None:
        self._runner = runner
        self._log = log
        self._begun: deque[int] = deque()  # numbers of steps that are to be sampled from

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        number = self._log.begin_step(step_to_wire(batch))
        logits = self._runner.logits(batch)
        self._begun.append(number)
        return logits

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        wait, number = self._runner.sample(batch, logits, sampling), self._begun.popleft()
        is_told = tells_of_all(batch, is_followed=self._runner.draft_model is not None)
        end = self._log.end_steps_on_all if is_told else self._log.end_steps

        def result() -> StepResult:
            found = wait()
            end(number)
            return found

        return result


class TensorParallelDraftModel:
    """Implements `DraftModel` over rank 0's part of it."""

    def __init__(self, model: DraftModel, log: RankLog) -> None:
        self._model = model
        self._log = log

    def draft(self, batch: DraftBatch) -> I64:
        number = self._log.begin_draft(draft_to_wire(batch))
        found = self._model.draft(batch)  # by logits of its own, so all ranks have come so far
        self._log.end_steps_on_all(number)
        return found

    def row(self, slot: int) -> bytes:
        return self._model.row(slot)  # which all ranks have

    def put_row(self, slot: int, row: bytes) -> None:
        self._log.append(rank_pb2.RankEntry(put_row=rank_pb2.HiddenRow(slot=slot, row=row)))
        self._model.put_row(slot, row)


class PipelineDraftModel(TensorParallelDraftModel):
    """The same where the last stage guesses: hidden rows are there alone."""

    def row(self, slot: int) -> bytes:
        self._log.append(rank_pb2.RankEntry(get_row=slot))
        return self._model.row(slot)
