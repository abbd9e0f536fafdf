"""The runner of rank 0: what it computes, it first tells the other ranks to compute. They do not sample."""

from __future__ import annotations

from typing import Any

from diptych.engine.tensor_parallel.log_codec import step_to_wire
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.engine.values.batch import ForwardBatch, OverlapRunner, SamplingBatch, StepResult, WaitForResult
from diptych.v1 import rank_pb2


class TensorParallelRunner:
    """Implements `OverlapRunner` over rank 0's own runner."""

    def __init__(self, runner: OverlapRunner, log: RankLog) -> None:
        self._runner = runner
        self._log = log

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        self._log.append(rank_pb2.RankEntry(step=step_to_wire(batch)))
        return self._runner.logits(batch)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        return self._runner.sample(batch, logits, sampling)
