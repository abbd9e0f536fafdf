"""How fast steps are, by a clock that the runner moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.measuring import FEW_TOKENS, TOKENS, step_speed
from diptych.engine.runner.gpu.warm_up import prompts
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult, WaitForResult

LIMITS = StepLimits(max_step_tokens=TOKENS, max_requests=8, max_pages=256)


class Clocked:
    """Launches a step, and computes a token in so long meanwhile; the first step of a size compiles for 20 s."""

    def __init__(self, launch_s: float, token_s: float) -> None:
        self.now_s = 0.0
        self._launch_s, self._token_s = launch_s, token_s
        self.sizes: list[int] = []

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        begun_s, size = self.now_s, len(batch.input_ids)
        self.now_s += self._launch_s if size in self.sizes else 20.0
        self.sizes.append(size)
        return max(self.now_s, begun_s + size * self._token_s)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        def wait() -> StepResult:
            self.now_s = max(self.now_s, logits)
            return StepResult(np.zeros(batch.batch_size, np.int64))

        return wait


@pytest.mark.parametrize(("launch_s", "token_s"), [(0.008, 25e-6), (0.03, 15e-6)], ids=["bf16", "FP8"])
def test_the_fastest_of_a_few_steps_counts_and_none_in_which_kernels_are_compiled(
    launch_s: float, token_s: float
) -> None:
    runner = Clocked(launch_s, token_s)
    small, large = (prompts(tokens, LIMITS, page_size=16, longest=4096) for tokens in (FEW_TOKENS, TOKENS))
    speed = step_speed(runner, small, large, lambda: runner.now_s)
    assert speed.prompt_tokens_per_s == pytest.approx(1 / token_s)
    assert round(speed.launch_s, 6) == launch_s
    assert set(runner.sizes) == {FEW_TOKENS, TOKENS}
