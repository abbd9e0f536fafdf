"""Steps in two micro-batches, by threads that share experts: the bits of whole steps, whoever has halves or is idle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from common_rounds import ROUNDS, new_pool
from thread_experts import ThreadExperts
from thread_ranks import Meeting, on_threads
from torch import Tensor

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.models.layers import spread_experts, spread_mlp
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.lockstep import part_of
from diptych.engine.tensor_parallel.sharing.expert_group import LoneCommunicator
from diptych.engine.values.batch import ForwardBatch
from diptych.engine.values.rounds import NOTHING, Round

FAMILIES = ("qwen2 moe", "deepseek v3", "gemma4, experts beside a network")  # and what they compute beside experts
NETWORKS = ("llama", "qwen3")  # that are cut over both


@dataclass
class Scheduler:
    """What one of two computes, and what it saw."""

    experts: ThreadExperts
    runner: ModelRunner
    logits: list[Tensor | None] = field(default_factory=list)
    layers: list[list[tuple[int, str]]] = field(default_factory=list)  # of each step: told of when what was sent
    exchanges: list[str] = field(default_factory=list)  # of each round

    def take_part(self, batch: ForwardBatch | None, common: Round) -> None:
        self.experts.begin(common)
        self.experts.exchanges = ""
        self.layers.append([])
        if batch is None:
            self.runner.serve_others()
        self.logits.append(None if batch is None else self.runner.logits(batch).clone())
        self.exchanges.append(self.experts.exchanges)
        assert self.experts.round == common

    def tell(self, layer: int) -> None:
        self.layers[-1].append((layer, self.experts.exchanges))


def computed(source: ModelSource, overlap: int, rank: int, meeting: Meeting) -> Scheduler:
    experts = ThreadExperts(rank, meeting)
    told: list[Any] = []
    runner = ModelRunner(
        source,
        new_pool(source),
        dtype="float32",
        communicator=LoneCommunicator(experts),  # type: ignore[arg-type]
        overlap_batches=overlap > 0,
        layer_listener=lambda: told[0].tell,
    )
    told.append(scheduler := Scheduler(experts, runner))
    for steps in ROUNDS:
        common = Round(tuple(NOTHING if each is None else part_of(each, overlap) for each in steps))
        scheduler.take_part(steps[rank], common)
    return scheduler


@pytest.mark.parametrize("padded_rows", [spread_experts.PADDED_ROWS, 0], ids=["padded", "counted"])
@pytest.mark.parametrize("family_model", [*FAMILIES, *NETWORKS[:1]], indirect=True)
def test_steps_in_halves_have_the_bits_of_whole_ones(
    family_model: Any, padded_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (spread_experts, spread_mlp):
        monkeypatch.setattr(module, "PADDED_ROWS", padded_rows)
    source = open_model(str(family_model.folder))
    whole, cut = (
        on_threads(2, lambda rank, meeting, overlap=overlap: computed(source, overlap, rank, meeting))  # type: ignore[misc]
        for overlap in (0, 2)
    )
    for ours, theirs in zip(cut, whole, strict=True):
        for found, expected in zip(ours.logits, theirs.logits, strict=True):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert torch.equal(found, expected)
    has_halves = [any(step is not None and part_of(step, 2).late_tokens for step in steps) for steps in ROUNDS]
    assert 0 < sum(has_halves) < len(ROUNDS)
    for rank, scheduler in enumerate(cut):
        for steps, halved, sent, told in zip(ROUNDS, has_halves, scheduler.exchanges, scheduler.layers, strict=True):
            sends = sent.count("s")
            in_turn = "ss" + "cs" * (sends - 2) + "cc"  # what one half awaits, it awaits while the other's is sent
            assert sent == (in_turn if halved else "sc" * sends)
            own = steps[rank]
            assert [layer for layer, _ in told] == ([] if own is None else list(range(source.config.num_layers)))
            if own is not None and part_of(own, 2).late_tokens and source.config.is_moe(0):
                assert told[0] == (0, "s"), "of a layer is told when both halves have it"


@pytest.mark.parametrize("family_model", [*FAMILIES[:1], *NETWORKS], indirect=True)
def test_two_schedulers_that_share_experts_compute_what_one_process_does(family_model: Any) -> None:
    source = open_model(str(family_model.folder))
    for rank, scheduler in enumerate(on_threads(2, lambda rank, meeting: computed(source, 2, rank, meeting))):
        alone = ModelRunner(source, new_pool(source), dtype="float32")
        for steps, found in zip(ROUNDS, scheduler.logits, strict=True):
            if (own := steps[rank]) is not None and found is not None:
                torch.testing.assert_close(found, alone.logits(own))
