"""Networks cut over the ranks of schedulers with attention of their own, threads here: two schedulers of two ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from common_rounds import ROUNDS, new_pool
from thread_experts import ThreadExperts
from thread_ranks import Meeting, ThreadCommunicator, on_threads
from torch import Tensor

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.lockstep import part_of
from diptych.engine.tensor_parallel.sum_rule import SumRule
from diptych.engine.values.rounds import NOTHING, Round

NEVER, ALWAYS = SumRule(2, None), SumRule(2, 0)


@dataclass
class Rank:
    """What one rank computes of each round, and what its scheduler's ranks tell each other for it."""

    logits: list[Tensor | None] = field(default_factory=list)
    calls: list[Counter[str]] = field(default_factory=list)


def computed(source: ModelSource, rule: SumRule) -> list[Rank]:
    """Return the ranks by scheduler; the first of each has logits."""
    meetings = [Meeting(2), Meeting(2)]

    def work(rank: int, everybody: Meeting) -> Rank:
        communicator = ThreadCommunicator(rank % 2, meetings[rank // 2], rule)
        communicator.experts = experts = ThreadExperts(rank, everybody, num_each=2)
        runner = ModelRunner(source, new_pool(source, 2), dtype="float32", communicator=communicator)
        return taking_part(runner, communicator, experts, rank // 2)

    return on_threads(4, work)


def taking_part(runner: ModelRunner, communicator: ThreadCommunicator, experts: ThreadExperts, scheduler: int) -> Rank:
    found = Rank()
    for steps in ROUNDS:
        experts.begin(Round(tuple(NOTHING if each is None else part_of(each, 0) for each in steps)))
        communicator.calls.clear()
        own = steps[scheduler]
        if own is None:
            runner.serve_others()
        found.logits.append(None if own is None else runner.logits(own).clone())
        found.calls.append(Counter(communicator.calls))
    return found


@pytest.mark.parametrize("family_model", ["qwen3", "glm4"], indirect=True)
def test_two_schedulers_of_two_ranks_compute_what_one_process_does(family_model: Any) -> None:
    """With a scattered stream, too: then ranks of a scheduler send each other half as much, and have the same bits."""
    source = open_model(str(family_model.folder))
    ways = [computed(source, rule) for rule in (NEVER, ALWAYS)]
    num_layers = source.config.num_layers
    for scheduler in range(2):
        alone = ModelRunner(source, new_pool(source), dtype="float32")
        whole, scattered = (way[2 * scheduler] for way in ways)
        for number, steps in enumerate(ROUNDS):
            if (own := steps[scheduler]) is None:
                assert not whole.calls[number], "who is idle tells its ranks nothing"
                continue
            found, same = whole.logits[number], scattered.logits[number]
            assert found is not None
            assert same is not None
            torch.testing.assert_close(found, alone.logits(own))
            assert torch.equal(found, same)
            assert whole.calls[number] == (sums := {"all_reduce": 1 + num_layers, "all_gather": num_layers})
            if len(own.input_ids) > 1:  # who has one row does not scatter
                sums = {"all_reduce": 2, "reduce_scatter": num_layers - 1}  # embeddings, and the last one's picked rows
                sums["all_gather"] = num_layers + 2  # of the first rows, too, and of those to pick from
            assert scattered.calls[number] == sums
