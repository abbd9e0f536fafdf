"""Steps of a scheduler that shares experts: each begins when all others step too, and theirs are ours without a token.

The rule: between two rounds of the clock every scheduler runs exactly one forward pass, or takes part without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from diptych.engine.schedule.micro_batches import halves, late_tokens
from diptych.engine.schedule.pace.prefill_meter import PrefillMeter
from diptych.engine.scheduler.stepping import Stepping
from diptych.engine.values.batch import (
    ForwardBatch,
    ForwardMode,
    OverlapRunner,
    SamplingBatch,
    StepResult,
    WaitForResult,
)
from diptych.engine.values.rounds import NOTHING, Part, Round


class Clock(Protocol):
    """Where schedulers wait for each other."""

    def is_called(self) -> bool: ...

    def meet(self, own: Part) -> Round: ...

    def close(self) -> None: ...


class LockstepRunner:
    """Implements `OverlapRunner`: no forward pass begins before the clock says so. One thread uses it."""

    def __init__(
        self,
        runner: OverlapRunner,
        clock: Clock,
        begin: Callable[[Round, bool], None],
        serve_others: Callable[[], None],
        overlap_batches: int = 0,
    ) -> None:
        """`begin` tells what computes here, on all ranks, of each round, and whether it is without us.

        `serve_others` takes part without a token. From `overlap_batches` tokens on a step has two micro-batches.
        """
        self._runner = runner
        self._clock = clock
        self._begin = begin
        self._serve_others = serve_others
        self._overlap_batches = overlap_batches
        self.num_passes = 0  # of our own

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        self.num_passes += 1
        self._begin(self._clock.meet(part_of(batch, self._overlap_batches)), False)
        return self._runner.logits(batch)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        return self._runner.sample(batch, logits, sampling)

    def answer_call(self) -> bool:
        """Take part in a round of others without a token, if there is one that waits for us."""
        if not self._clock.is_called():
            return False
        self._begin(self._clock.meet(NOTHING), True)
        self._serve_others()
        return True


def part_of(batch: ForwardBatch, overlap_batches: int = 0) -> Part:
    """Return how large a batch is in the layers, and its second half, if it is computed in two."""
    num_tokens, num_prompt_rows = len(batch.input_ids), 0
    if batch.prompt_rows is not None:
        num_prompt_rows = len(batch.prompt_rows.token_rows)
    num_picked = int(np.sum(batch.num_sampled)) + num_prompt_rows
    is_plain = batch.mode is ForwardMode.DECODE and batch.prompt_rows is None and num_picked == num_tokens
    late = late_tokens(batch, overlap_batches)
    late_picked = halves(batch, late)[1].num_samples if late else 0
    return Part(num_tokens, num_picked, is_plain, late, late_picked)


class LockstepStepping:
    """Implements `Stepping`: as another one, which runs by `runner`, and beside it rounds of others."""

    def __init__(self, stepping: Stepping, runner: LockstepRunner, clock: Clock) -> None:
        self._stepping = stepping
        self._runner = runner
        self._clock = clock

    @property
    def meter(self) -> PrefillMeter:
        return self._stepping.meter

    def advance(self, perform: Callable[[], None]) -> bool:
        before = self._runner.num_passes
        is_busy = self._stepping.advance(perform)
        if self._runner.num_passes == before and self._runner.answer_call():
            return True
        return is_busy

    def close(self) -> None:
        self._clock.close()
        self._stepping.close()
