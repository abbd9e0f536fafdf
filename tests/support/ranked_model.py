"""A real model on one rank or several, which are threads, with the pool of each: one side of a pair computes on it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from page_landing import land
from thread_ranks import Meeting, ThreadCommunicator, ThreadStages, new_lines

from diptych.checkpoints.shard import Shard
from diptych.checkpoints.source import ModelSource
from diptych.common.arrays import I64
from diptych.engine.models.adapters.lora_host import LoraHost
from diptych.engine.options.pool_size import most_state_pages
from diptych.engine.runner.model_part import ModelPart, own_layers
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import DraftBatch, DraftModel, ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.kv_regions import kv_layout, with_states
from diptych.kvtransfer.layout import HeadShare, PoolLayout
from diptych.kvtransfer.plan import Parts, lands_in_parts, parts_of, plan
from diptych.kvtransfer.transport import PageWrite

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Shape:
    """How a worker's KV lies."""

    page_size: int
    tp: int = 1
    pp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp


class RankPools:
    """The pools of all ranks, `[num_pages, page_nbytes]` each: by page and rank, or by page, of all side by side."""

    def __init__(self, pools: list[Array]) -> None:
        self._pools = pools

    def __getitem__(self, key: Any) -> Array:
        if isinstance(key, tuple):
            pages, rank = key
            found: Array = self._pools[rank][pages]
            return found
        return np.concatenate([pool[key] for pool in self._pools], axis=-1)

    def __setitem__(self, key: tuple[Any, int], value: Any) -> None:
        pages, rank = key
        self._pools[rank][pages] = value


@dataclass
class RankedModel:
    """Implements `Runner`. `kv` begins as NaN."""

    source: ModelSource
    shape: Shape
    num_pages: int
    max_loras: int = 0
    draft: ModelSource | None = None  # that guesses; `source` has its layers
    kv: RankPools = field(init=False)
    layouts: list[PoolLayout] = field(init=False)

    def __post_init__(self) -> None:
        self._communicators = _communicators(self.shape)
        self.layouts = [self._layout(rank) for rank in range(self.shape.num_ranks)]
        pools = [np.full((self.num_pages, layout.page_nbytes), 0xFF, np.uint8) for layout in self.layouts]
        self.kv = RankPools(pools)
        self._runners = self._together(lambda rank: self._runner(rank, pools[rank]))

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        results: list[StepResult] = self._together(lambda rank: self._runners[rank].execute(batch, sampling))
        return results[0]

    def logits(self, batch: ForwardBatch) -> Any:
        return self._together(lambda rank: self._runners[rank].logits(batch))[0]

    @property
    def draft_model(self) -> RankedDrafts:
        return RankedDrafts([each.draft_model for each in self._runners if each.draft_model], self._together)

    def install(self, slot: int, folder: Path) -> None:
        """Put an adapter into a slot of every rank, as PEFT saved it."""
        for rank, runner in enumerate(self._runners):
            layers = own_layers(self.source.config, self._communicators[rank].stages)
            shard = Shard(rank % self.shape.tp, self.shape.tp, layers=layers)
            host = LoraHost(self.source.config, shard, partial(getattr, runner, "loras"))
            host.install(slot, host.read(folder).weights)

    def _layout(self, rank: int) -> PoolLayout:
        whole = self.source.config
        part = whole if self.shape.num_ranks == 1 else ModelPart.of(self.source, self._communicators[rank]).config
        share = HeadShare(rank % self.shape.tp, self.shape.tp, whole.num_kv_heads)
        pages = kv_layout(part, self.num_pages, self.shape.page_size, "float32", share)
        return with_states(pages, part, "float32", most_state_pages(pages, part, whole, self.shape.pp, "float32"))

    def _runner(self, rank: int, pool: Array) -> ModelRunner:
        kv = torch.from_numpy(pool.view(np.float32).reshape(self.layouts[rank].shape))
        communicator = None if self.shape.num_ranks == 1 else self._communicators[rank]
        options: dict[str, Any] = {"max_requests": 16, "max_loras": self.max_loras, "communicator": communicator}
        options |= {"draft": self.draft, "row_tokens": 6 if self.draft else 1}
        return ModelRunner(self.source, kv, dtype="float32", **options)

    def _together(self, work: Callable[[int], Any]) -> list[Any]:
        if self.shape.num_ranks == 1:
            return [work(0)]
        with ThreadPoolExecutor(self.shape.num_ranks) as pool:
            return list(pool.map(work, range(self.shape.num_ranks)))


@dataclass(frozen=True)
class RankedDrafts:
    """Implements `DraftModel`: every rank is asked, and the first one answers."""

    models: list[DraftModel]
    together: Callable[[Callable[[int], Any]], list[Any]]

    def draft(self, batch: DraftBatch) -> I64:
        found: I64 = self.together(lambda rank: self.models[rank].draft(batch))[0]
        return found

    def row(self, slot: int) -> bytes:
        return bytes(self.together(lambda rank: self.models[rank].row(slot))[0])

    def put_row(self, slot: int, row: bytes) -> None:
        self.together(lambda rank: self.models[rank].put_row(slot, row))


def _communicators(shape: Shape) -> list[ThreadCommunicator]:
    """Those of all ranks, stage by stage."""
    lines = [new_lines(shape.pp) for _ in range(shape.tp)]
    meetings = [Meeting(shape.tp) for _ in range(shape.pp)]
    ranks = [(stage, rank) for stage in range(shape.pp) for rank in range(shape.tp)]
    found = [ThreadCommunicator(rank, meetings[stage]) for stage, rank in ranks]
    for communicator, (stage, rank) in zip(found, ranks, strict=True):
        communicator.stages = ThreadStages(stage, lines[rank]) if shape.pp > 1 else None
    return found


def write(src: RankedModel, dst: RankedModel, pages: PageWrite) -> int:
    """Let every rank write what it is to write to every other's; return the bytes that landed."""
    num_bytes = 0
    for rank, layout in enumerate(src.layouts):
        for other, target in enumerate(dst.layouts):
            copies = plan(layout, target)
            for runs in copies.cut(pages) if copies is not None else ():
                num_bytes += land(src.kv[:, rank], dst.kv[:, other], runs)
    return num_bytes


def has_parts(src: RankedModel, dst: RankedModel) -> bool:
    """Return whether rank 0 of `dst` would have pages put together."""
    return lands_in_parts(src.layouts, dst.layouts[0])


def parts_from(src: RankedModel, dst: RankedModel) -> list[tuple[Parts, ...]]:
    """Return what has to be put together in a page of each rank of `dst`."""
    stages = src.layouts[:: src.shape.tp]
    found = ([parts for stage in stages for parts in parts_of(stage, layout)] for layout in dst.layouts)
    return [tuple(parts for parts in regions if len(parts.heads) > 1) for regions in found]
