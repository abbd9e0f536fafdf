"""Marks on the GPU's stream around what a runner queues: how long the GPU had nothing to do between steps.

Of each half of a step, forward pass and sampling, the GPU's own clock tells when it began and ended. A half that was
queued before the one before it had ended begins when that ends, and runs without a pause that the host could make. One
that was queued too late may wait for the host inside, too: all the time that queuing it took is counted as idle then,
so the share of idle time is never too low.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from diptych.engine.values.batch import ForwardBatch, OverlapRunner, SamplingBatch, StepResult, WaitForResult

T = TypeVar("T")
HALVES: Final = 2  # of a step
WARM_STEPS: Final = 4  # a graph is captured, the host gets ahead of the GPU


@dataclass(frozen=True, slots=True)
class Half:
    """A forward pass, or the sampling of one."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    late_s: float  # how long it was queued while the GPU had nothing to do; 0: it had


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast consecutive steps of one size follow each other."""

    step_s: float  # from the begin of one to the begin of the next
    idle: float  # share of that in which the GPU had nothing to do
    late: float  # share of halves that were queued after the GPU had run out of work


class Marks:
    """Implements `OverlapRunner` by another one; marks steps of `num_tokens`. One of another size begins anew."""

    def __init__(self, runner: OverlapRunner, num_steps: int, num_tokens: int) -> None:
        self._runner = runner
        self._wanted = HALVES * (num_steps + WARM_STEPS + 1)
        self._num_tokens = num_tokens
        self._halves: list[Half] = []

    @property
    def is_full(self) -> bool:
        """Whether as many steps as wanted were marked."""
        return len(self._halves) >= self._wanted

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        if len(batch.input_ids) != self._num_tokens:
            self._halves = []
            return self._runner.logits(batch)
        return self._marked(lambda: self._runner.logits(batch))

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        if not self._halves:
            return self._runner.sample(batch, logits, sampling)
        return self._marked(lambda: self._runner.sample(batch, logits, sampling))

    def pace(self) -> Pace:
        """Wait for the GPU, and return what was marked."""
        torch.cuda.synchronize()
        halves = self._halves[HALVES * WARM_STEPS : self._wanted]
        whole = halves[:-HALVES]  # the last step only says where the one before it ended
        span_s = halves[0].begin.elapsed_time(halves[-HALVES].begin) / 1e3
        busy_s = sum(max(0.0, each.begin.elapsed_time(each.end) / 1e3 - each.late_s) for each in whole)
        late = sum(each.late_s > 0 for each in whole) / len(whole)
        return Pace(HALVES * span_s / len(whole), max(0.0, 1 - busy_s / span_s), late)

    def _marked(self, queue: Callable[[], T]) -> T:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began_s = time.perf_counter()
        begin.record()
        queued = queue()
        end.record()
        is_late = not self._halves or self._halves[-1].end.query()
        self._halves.append(Half(begin, end, time.perf_counter() - began_s if is_late else 0.0))
        return queued
