"""Steps that a device works through by itself: the order in which they are queued, and who waits for what."""

from __future__ import annotations

from typing import Any

import numpy as np

from diptych.engine.scheduler.stepping import QueuedSteps
from diptych.engine.values.batch import ForwardBatch, ForwardMode, SamplingBatch, StepResult, WaitForResult


class Device:
    """A runner that notes what is queued on it, and what is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> int:
        step = int(batch.input_ids[0])
        self.log.append(f"forward {step}")
        return step

    def sample(self, batch: ForwardBatch, logits: int, sampling: SamplingBatch) -> WaitForResult:
        self.log.append(f"sample {logits}")

        def wait() -> StepResult:
            self.log.append(f"wait {logits}")
            return StepResult(np.array([logits + 100]))

        return wait


def test_the_next_pass_is_queued_before_anybody_waits_for_the_tokens_of_the_one_before() -> None:
    device = Device()
    steps = QueuedSteps(device)
    steps.forward(batch(0))
    steps.sample(any_sampling())
    results = []
    for step in (1, 2):
        steps.forward(batch(step))
        results.append(int(steps.result().token_ids[0]))
        steps.sample(any_sampling())
    steps.close()
    assert results == [100, 101]
    assert device.log == [
        *("forward 0", "sample 0"),
        *("forward 1", "wait 0", "sample 1"),
        *("forward 2", "wait 1", "sample 2"),
    ]


def batch(step: int) -> ForwardBatch:
    one = np.ones(1, dtype=np.int64)
    return ForwardBatch(ForwardMode.DECODE, one * step, one, one, np.ones((1, 1), np.int32), one, one, one - 1)


def any_sampling() -> SamplingBatch:
    one: Any = np.ones(1, dtype=np.float32)
    zero = np.zeros(1, dtype=np.int64)
    return SamplingBatch(one * 0, one, zero, zero.astype(np.uint64), zero)
