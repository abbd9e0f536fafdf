"""How busy a scheduler is with prompts, and how fast it computes them: what a pool of workers is scaled by. Pure.

A step counts from when it was planned, or from the end of the step before it where that was later. What a step does for
requests that decode beside its prompts is not told apart: prompts are as fast as they are there.

While somebody watches, each step is noted in `log`. What steps cost by their shape is learned in `fit`, with the time
that the scheduler itself took before each: requests wait for that, too.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

from diptych.engine.schedule.pace.step_fit import StepFit
from diptych.engine.schedule.step_log import LoggedStep, StepLog, StepSize
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.engine.values.step_model import StepModel, StepShape

BUSY_MEMORY_S: Final = 60.0  # what was longer ago counts less than 1/e
SPEED_MEMORY_S: Final = 30.0  # likewise, in time that was spent on prompts
LAST_STEPS: Final = 256  # that are remembered, for who asks what happened last
LEARNED_EVERY: Final = 8  # steps without prompts, which are alike: each would cost microseconds
RENEWED: Final = 1.02  # times the time of prompts since start: then what predictions go by is asked for again
FIT_MEMORY_STEPS: Final = 4096  # likewise, of steps of one kind


class _Begun(NamedTuple):
    """A step that runs."""

    num_prompt_tokens: int
    began_s: float  # when it was planned
    host_s: float  # before that, since the end of another one
    shape: StepShape | None  # None: nobody wants to know
    num_requests: int
    mode: ForwardMode
    num_tokens: int


class LastStep(NamedTuple):
    """A step of late, as a crash dump tells it."""

    began_s: float
    took_s: float  # -1: it runs
    host_s: float
    mode: str
    requests: int
    tokens: int


class PrefillMeter:
    """Tell it when steps begin and end, in their order."""

    def __init__(self) -> None:
        self.total_s = 0.0  # in steps that computed prompts
        self.log = StepLog()
        self.fit = StepFit(FIT_MEMORY_STEPS)
        self._model: StepModel | None = None  # as of when prompts had taken so long:
        self._modelled_s = 0.0
        self._running: deque[_Begun] = deque()
        self._last: deque[tuple[_Begun, float]] = deque(maxlen=LAST_STEPS)  # with the time of each
        self._num_plain = 0  # steps without prompts
        self._rested = True  # there was nothing to compute since the last step
        self._ended_s = -math.inf  # the last step
        self._busy = 0.0  # as of `_busy_s`
        self._busy_s = 0.0  # when the last step with prompts ended
        self._tokens = self._seconds = 0.0  # of late

    @property
    def tokens_per_s(self) -> float:
        """The speed of late; 0: not measured."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def compute_s(self, start: int, end: int) -> float:
        """Predict how long computing a prompt's tokens from `start` to `end` takes, beside the constant of its steps.

        0 while nothing is known: then nobody waits for another way to get them.
        """
        if not self._tokens:
            return 0.0
        if self.total_s > RENEWED * self._modelled_s:
            self._model, self._modelled_s = self.fit.model(), self.total_s
        if self._model is None:
            return (end - start) / self.tokens_per_s
        shape = StepShape(0, 0, end - start, (end**2 - start**2) / 2, 1)
        return self._model.seconds(shape) - max(self._model.step, self._model.prompt_step)

    @property
    def is_running(self) -> bool:
        """Whether a step has begun and not ended."""
        return bool(self._running)

    def last_steps(self) -> list[LastStep]:
        """Return the steps of late, and those that run, the oldest first."""
        steps = [*self._last, *((step, -1.0) for step in self._running)]
        return [
            LastStep(step.began_s, took_s, step.host_s, step.mode.value, step.num_requests, step.num_tokens)
            for step, took_s in steps
        ]

    def busy(self, now_s: float) -> float:
        """Return the share of time in which prompts were computed, of late."""
        return self._busy * _kept(now_s - self._busy_s)

    def begin(self, batch: ForwardBatch, now_s: float) -> None:
        host_s = 0.0 if self._rested or self._running else max(0.0, now_s - self._ended_s)
        shape = StepShape.of(batch) if self._wants_shape(batch) else None
        self._running.append(
            _Begun(
                0 if shape is None else _prompt_tokens(batch, shape),
                now_s,
                host_s,
                shape,
                len(batch.seq_lens),
                batch.mode,
                len(batch.input_ids),
            )
        )
        self._rested = False

    def _wants_shape(self, batch: ForwardBatch) -> bool:
        """Whether the step is noted, or learned from."""
        if batch.mode is not ForwardMode.DECODE:
            return True
        self._num_plain += 1
        return self.log.is_on or self._num_plain % LEARNED_EVERY == 0

    def rest(self) -> None:
        """There is nothing to compute: the time until the next step is not the scheduler's."""
        self._rested = True

    def end(self, now_s: float) -> None:
        """The oldest step that runs is complete."""
        step, took_s = self._spend(now_s)
        if step.shape is not None:
            self.fit.learn(step.shape, step.host_s + took_s)
        if step.num_prompt_tokens:
            keep = math.exp(-took_s / SPEED_MEMORY_S)
            self._tokens = self._tokens * keep + step.num_prompt_tokens
            self._seconds = self._seconds * keep + took_s

    def give_up(self, now_s: float) -> None:
        """The only step that runs will never be complete: its time was spent, and says nothing of the speed."""
        self._spend(now_s)

    def _spend(self, now_s: float) -> tuple[_Begun, float]:
        """Return the oldest step, and its time, which is spent."""
        step = self._running.popleft()
        began_s = max(step.began_s, self._ended_s)
        took_s = now_s - began_s
        self._last.append((step, took_s))
        if self.log.is_on and step.shape is not None:
            size = StepSize.of(step.shape, step.num_prompt_tokens, step.num_requests)
            self.log.add(LoggedStep(began_s, took_s, size, step.host_s))
        self._ended_s = now_s
        if step.num_prompt_tokens:
            self.total_s += took_s
            self._busy, self._busy_s = self.busy(now_s) + 1 - _kept(took_s), now_s
        return step, took_s


def _prompt_tokens(batch: ForwardBatch, shape: StepShape) -> int:
    """Return how many tokens of prompts a step computes; of a mixed step not those of rows, as outputs have."""
    return len(batch.input_ids) if batch.mode is ForwardMode.EXTEND else shape.prompt_tokens


def _kept(elapsed_s: float) -> float:
    return math.exp(-elapsed_s / BUSY_MEMORY_S)
