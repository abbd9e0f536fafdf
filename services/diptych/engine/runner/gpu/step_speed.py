"""How fast a loaded model computes prompts, and how long the host takes to launch a step: a few steps tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from diptych.engine.runner.gpu.warm_up import greedy
from diptych.engine.values.batch import ForwardBatch, OverlapRunner

TOKENS: Final = 512  # of a step whose kernels take longer than launching them
FEW_TOKENS: Final = 16  # of one whose launches are what takes the time
ROUNDS: Final = 3  # after one that compiles and loads kernels; the fastest counts


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """How fast steps are that are launched kernel by kernel."""

    prompt_tokens_per_s: float
    launch_s: float


def step_speed(
    runner: OverlapRunner, small: ForwardBatch, large: ForwardBatch, clock: Callable[[], float]
) -> StepSpeed:
    """Run the steps; nothing else may run. On tensor-parallel ranks this is a collective."""
    launches_s, steps_s = [], []
    for _ in range(1 + ROUNDS):
        began_s = clock()
        logits = runner.logits(small)
        launches_s.append(clock() - began_s)
        runner.sample(small, logits, greedy(small.batch_size))()
        began_s = clock()
        runner.execute(large, greedy(large.batch_size))
        steps_s.append(clock() - began_s)
    return StepSpeed(len(large.input_ids) / min(steps_s[1:]), min(launches_s[1:]))
