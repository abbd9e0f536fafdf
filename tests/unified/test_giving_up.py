"""A step that is given up leaves nothing behind: its rooms end, and whoever has the same prompt next gets its own."""

from __future__ import annotations

from typing import Any

import pytest
from null_runner import expected_output

from diptych.common.members.roles import Role
from diptych.engine.scheduler.stepping import StepGivenUp, SynchronousStepping
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.events import AbortRoom
from diptych.generation.output import FailureCode

PROMPT = list(range(20))
VOCAB = 1000


class HalfStep:
    """Runs half of a step: some of its KV is there, and wrong."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.rooms: set[int] = set()

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        self.rooms = set(self._worker.core.rooms_of_step())
        self._worker.kv.flat[batch.out_slots] = 13
        raise StepGivenUp


@pytest.mark.parametrize("num_moves", range(6))
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 1)])
def test_a_step_that_is_given_up_never_happened(fleet_class: Any, prefill: int, decode: int, num_moves: int) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    fleet.start(1, PROMPT, prefill, decode)
    for _ in range(num_moves):
        fleet.advance(1)
        fleet.advance(2)
    worker, half = fleet.workers[1], HalfStep(fleet.workers[1])
    stepping, worker.stepping = worker.stepping, SynchronousStepping(worker.core, half, lambda: 0.0)
    fleet.advance(1)
    worker.stepping = stepping
    for room in half.rooms:
        worker.core.handle(AbortRoom(room, "the client left"), 0.0)
    fleet.run()
    ends = [output.failure.code for output in worker.outputs[1] if output.failure]
    assert ends == [FailureCode.ABORTED] * len(half.rooms)
    assert all(
        other.core.report().num_open_rooms == 0 and other.cache.audit(other.core.report().holders) == []
        for other in fleet.workers.values()
    )
    fleet.start(2, PROMPT, prefill, decode)
    fleet.run()
    assert fleet.tokens(2) == expected_output(PROMPT, 5, VOCAB)
