"""How fast steps are, by a clock that the runner moves."""

from __future__ import annotations

from typing import Any

import numpy as np

from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.measuring import FEW_TOKENS, TOKENS, step_speed
from diptych.engine.runner.gpu.warm_up import prompts
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult, WaitForResult

LIMITS = StepLimits(max_step_tokens=TOKENS, max_requests=8, max_pages=64)


class Clocked:
    """Launches a step in 8 ms and computes a token in 25 us meanwhile; the first step of a size compiles for 20 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sizes: list[int] = []

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        begun_s, size = self.now_s, len(batch.input_ids)
        self.now_s += 0.008 if size in self.sizes else 20.0
        self.sizes.append(size)
        return max(self.now_s, begun_s + size * 25e-6)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        def wait() -> StepResult:
            self.now_s = max(self.now_s, logits)
            return StepResult(np.zeros(batch.batch_size, np.int64))

        return wait


def test_the_fastest_of_a_few_steps_counts_and_none_in_which_kernels_are_compiled() -> None:
    runner = Clocked()
    small, large = (prompts(tokens, LIMITS, page_size=16, longest=1024) for tokens in (FEW_TOKENS, TOKENS))
    speed = step_speed(runner, small, large, lambda: runner.now_s)
    assert round(speed.prompt_tokens_per_s) == 40_000
    assert round(speed.launch_s, 6) == 0.008
    assert set(runner.sizes) == {FEW_TOKENS, TOKENS}
