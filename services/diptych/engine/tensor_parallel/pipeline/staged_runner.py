"""Steps of the first stage of a pipeline, which end before those of the stages behind it."""

from __future__ import annotations

from collections import deque
from typing import Any

from diptych.engine.tensor_parallel.rank_log import RankLog, step_to_wire
from diptych.engine.values.batch import ForwardBatch, OverlapRunner, SamplingBatch, StepResult, WaitForResult


class StagedRunner:
    """Implements `OverlapRunner` over rank 0's own runner, and tells the log of all which steps may not have ended.

    A step that is sampled from ends in the last stage, and so have all before it; another one ends here.
    """

    def __init__(self, runner: OverlapRunner, log: RankLog) -> None:
        self._runner = runner
        self._log = log
        self._begun: deque[int] = deque()  # numbers of steps that are to be sampled from, in order

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        self._begun.append(self._log.begin_step(step_to_wire(batch)))
        return self._runner.logits(batch)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        wait, number = self._runner.sample(batch, logits, sampling), self._begun.popleft()
        if not len(logits):
            return wait

        def result() -> StepResult:
            found = wait()
            self._log.end_steps(number)
            return found

        return result
