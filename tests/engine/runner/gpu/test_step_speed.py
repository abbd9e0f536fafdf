"""How fast steps are, by a clock that the runner moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.measuring import (
    FEW_TOKENS,
    TOKENS,
    longest_timed,
    step_speed,
    timed_limits,
    timed_steps,
)
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


def test_speed_is_measured_by_a_long_step_whatever_a_cpu_would_take_if_there_is_room_for_it() -> None:
    small_limits = StepLimits(max_step_tokens=512, max_requests=64, max_pages=1024)
    for room, max_pages, expected in ((1e6, 1024, TOKENS), (3000.5, 1024, 3000), (0.0, 1024, 512), (1e6, 64, 1024)):
        limits = timed_limits(replace(small_limits, max_pages=max_pages), room)
        few, many = timed_steps(limits, page_size=16)
        assert few.extend_lens.tolist() == [FEW_TOKENS]
        assert many.extend_lens.tolist() == [expected]  # one prompt, no longer than a context
        assert len(many.input_ids) <= limits.max_step_tokens
        assert many.seq_lens.max() <= longest_timed(limits, page_size=16)  # so the pool has room for it
