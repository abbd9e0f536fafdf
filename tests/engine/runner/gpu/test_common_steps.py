"""Steps of schedulers that share experts on emulated GPUs, threads here: recorded where all decode, whoever is idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from common_rounds import PAGES, PREFILL, ROUNDS, new_pool, step
from emulated_gpu import Recorder, emulated_runner
from thread_experts import ThreadExperts, ThreadPeers
from thread_ranks import Meeting, on_threads
from torch import Tensor

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.graphs import Captured
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.lockstep import part_of
from diptych.engine.tensor_parallel.sharing.expert_group import LoneCommunicator
from diptych.engine.values.batch import ForwardBatch
from diptych.engine.values.rounds import NOTHING, Part, Round

RUNGS, TOKEN_RUNGS = (1, 4), (8, 16)
LIMITS = StepLimits(max_step_tokens=32, max_requests=4, max_pages=PAGES)
ROUNDS_IN_PIECES = [5, 3]  # the second one is idle in two of those with prompts


@dataclass
class Baking(Recorder):
    """Has a replay see the round that there was when it was captured, as what is baked into a graph."""

    experts: ThreadExperts
    captured: int = field(default=0, init=False)
    replayed: int = field(default=0, init=False)
    _nbytes: int = field(default=0, init=False)

    def capture(self, work: Callable[[], Any]) -> Captured[Any]:
        common = self.experts.round
        found = super().capture(work)

        def replay() -> None:
            self.replayed += 1
            now, self.experts.round = self.experts.round, common
            found.replay()
            self.experts.round = now

        return Captured(replay, found.output)


@dataclass
class Scheduler:
    runner: GpuRunner
    experts: ThreadExperts
    peers: ThreadPeers
    recorder: Baking
    found: list[Tensor | None]
    replays: list[int]  # of each round

    @staticmethod
    def new(source: ModelSource, rank: int, meeting: Meeting, most_recorded: int, *, overlaps: bool) -> Scheduler:
        """One that overlaps exchanges by collectives."""
        experts = ThreadExperts(rank, meeting, most_recorded=most_recorded)
        num_experts = 2 if source.config.moe is None else source.config.moe.num_experts
        peers = ThreadPeers(rank, meeting, experts.room(num_experts), 64)
        experts.exchange_by = None if overlaps else peers
        communicator: Any = LoneCommunicator(experts)  # type: ignore[arg-type]
        kv = new_pool(source)
        model = load_model(source, kv, ModelOptions("float32", overlap_batches=overlaps), communicator)
        rungs, token_rungs = (RUNGS, TOKEN_RUNGS) if most_recorded else ((), ())
        recorder = Baking(experts)
        runner = emulated_runner(model, kv, LIMITS, rungs=rungs, token_rungs=token_rungs, recorder=recorder)
        for size in token_rungs:  # all record prompts ahead
            runner.logits(step(PREFILL, [(0, 0)], size))
        return Scheduler(runner, experts, peers, recorder, [], [])

    def run(self, batch: ForwardBatch | None, common: Round) -> None:
        self.experts.begin(common)
        before = self.recorder.replayed
        if batch is None:
            self.runner.serve_others()
            self.found.append(None)
        else:
            self.found.append(self.runner.logits(batch).clone())
        self.replays.append(self.recorder.replayed - before)


@pytest.fixture(scope="module")
def source(tiny_experts_folder: Path) -> ModelSource:
    return open_model(str(tiny_experts_folder))


@pytest.fixture(scope="module")
def alone(source: ModelSource) -> list[list[Tensor | None]]:
    return computed_alone(source)


def computed_alone(source: ModelSource) -> list[list[Tensor | None]]:
    """What each scheduler's steps give in a process that has all experts, or whole networks."""
    runners = [ModelRunner(source, new_pool(source), dtype="float32") for _ in range(2)]
    return [
        [None if (own := steps[i]) is None else runner.logits(own).clone() for steps in ROUNDS]
        for i, runner in enumerate(runners)
    ]


def run(source: ModelSource, most_recorded: int, overlap: int, rank: int, meeting: Meeting) -> Scheduler:
    scheduler = Scheduler.new(source, rank, meeting, most_recorded, overlaps=overlap > 0)
    for steps in ROUNDS:
        parts: list[Part] = [NOTHING if each is None else part_of(each, overlap) for each in steps]
        scheduler.run(steps[rank], Round(tuple(parts)))
    return scheduler


@pytest.mark.parametrize("most_recorded", [0, 64], ids=["launched", "replayed"])
def test_steps_give_what_a_process_alone_computes_launched_or_replayed(
    source: ModelSource, alone: list[list[Tensor | None]], most_recorded: int
) -> None:
    schedulers = on_threads(2, lambda rank, meeting: run(source, most_recorded, 0, rank, meeting))
    for scheduler, expected in zip(schedulers, alone, strict=True):
        assert [each is None for each in scheduler.found] == [each is None for each in expected]
        for found, wanted in zip(scheduler.found, expected, strict=True):
            if found is not None and wanted is not None:
                torch.testing.assert_close(found, wanted)
    assert schedulers[0].peers.bounds == schedulers[1].peers.bounds
    num_graphs = [len(scheduler.runner.recorded.graphs) for scheduler in schedulers]
    assert num_graphs == ([2, 2] if most_recorded else [0, 0])
    in_pieces = [sum(each > 1 for each in scheduler.replays) for scheduler in schedulers]
    assert in_pieces == (ROUNDS_IN_PIECES if most_recorded else [0, 0])
    assert {*TOKEN_RUNGS} < {*schedulers[1].peers.bounds} or not most_recorded


def test_halves_of_steps_give_what_a_process_alone_computes(
    source: ModelSource, alone: list[list[Tensor | None]]
) -> None:
    schedulers = on_threads(2, lambda rank, meeting: run(source, 0, 2, rank, meeting))
    for scheduler, expected in zip(schedulers, alone, strict=True):
        assert "ss" in scheduler.experts.exchanges
        for found, wanted in zip(scheduler.found, expected, strict=True):
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("overlap", [0, 2], ids=["whole", "halves"])
def test_networks_that_both_share_give_what_a_process_alone_computes(tiny_folder: Path, overlap: int) -> None:
    """Also where rows of nobody stand behind those that are picked."""
    source = open_model(str(tiny_folder))
    schedulers = on_threads(2, lambda rank, meeting: run(source, 0, overlap, rank, meeting))
    for scheduler, expected in zip(schedulers, computed_alone(source), strict=True):
        for found, wanted in zip(scheduler.found, expected, strict=True):
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                torch.testing.assert_close(found, wanted)
