"""Hands steps to a runner that only queues them on a device, and fills in placeholders there.

No thread: nothing here waits but `result`, and meanwhile the device has the next forward pass to do already.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from diptych.engine.values.batch import ForwardBatch, OverlapRunner, SamplingBatch, StepResult, WaitForResult


class QueuedSteps:
    """Implements `ModelWorker`."""

    def __init__(self, runner: OverlapRunner) -> None:
        self._runner = runner
        self._passes: deque[tuple[ForwardBatch, Any]] = deque()  # to be sampled from, with their logits
        self._results: deque[WaitForResult] = deque()

    def forward(self, batch: ForwardBatch) -> None:
        self._passes.append((batch, self._runner.logits(batch)))

    def sample(self, sampling: SamplingBatch) -> None:
        batch, logits = self._passes.popleft()
        self._results.append(self._runner.sample(batch, logits, sampling))

    def result(self) -> StepResult:
        return self._results.popleft()()

    def close(self) -> None:
        """What is queued runs to its end by itself."""
