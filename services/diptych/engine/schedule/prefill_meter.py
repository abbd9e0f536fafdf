"""How busy a scheduler is with prompts, and how fast it computes them: what a pool of workers is scaled by. Pure.

A step counts from when it was planned, or from the end of the step before it where that was later. What a step does for
requests that decode beside its prompts is not told apart: prompts are as fast as they are there.

While somebody watches, each step is noted in `log`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from diptych.engine.schedule.step_log import StepLog, StepSize
from diptych.engine.values.batch import ForwardBatch, ForwardMode

BUSY_MEMORY_S: Final = 60.0  # what was longer ago counts less than 1/e
SPEED_MEMORY_S: Final = 30.0  # likewise, in time that was spent on prompts


class PrefillMeter:
    """Tell it when steps begin and end, in their order."""

    def __init__(self) -> None:
        self.total_s = 0.0  # in steps that computed prompts
        self.log = StepLog()
        # Steps: tokens of prompts, when it was planned, what is to be noted of it.
        self._running: deque[tuple[int, float, StepSize | None]] = deque()
        self._ended_s = -math.inf  # the last step
        self._busy = 0.0  # as of `_ended_s`
        self._tokens = self._seconds = 0.0  # of late

    @property
    def tokens_per_s(self) -> float:
        """The speed of late; 0: not measured."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def busy(self, now_s: float) -> float:
        """Return the share of time in which prompts were computed, of late."""
        return self._busy * _kept(now_s - self._ended_s)

    def begin(self, batch: ForwardBatch, now_s: float) -> None:
        num_tokens = prompt_tokens(batch)
        self._running.append((num_tokens, now_s, self.log.size_of(batch, num_tokens) if self.log.is_on else None))

    def end(self, now_s: float) -> None:
        """The oldest step that runs is complete."""
        num_tokens, took_s = self._spend(now_s)
        if num_tokens:
            keep = math.exp(-took_s / SPEED_MEMORY_S)
            self._tokens = self._tokens * keep + num_tokens
            self._seconds = self._seconds * keep + took_s

    def give_up(self, now_s: float) -> None:
        """The only step that runs will never be complete: its time was spent, and says nothing of the speed."""
        self._spend(now_s)

    def _spend(self, now_s: float) -> tuple[int, float]:
        """Return the oldest step's tokens of prompts, and its time, which is spent."""
        num_tokens, began_s, size = self._running.popleft()
        began_s = max(began_s, self._ended_s)
        took_s = now_s - began_s
        if size is not None:
            self.log.add(size, began_s, took_s)
        self._busy = self.busy(now_s)
        self._ended_s = now_s
        if num_tokens:
            self.total_s += took_s
            self._busy += 1 - _kept(took_s)
        return num_tokens, took_s


def prompt_tokens(batch: ForwardBatch) -> int:
    """Return how many tokens of prompts a step computes; of a mixed step not those of rows, as outputs have."""
    if batch.mode is ForwardMode.DECODE:
        return 0
    if batch.mode is ForwardMode.EXTEND:
        return len(batch.input_ids)
    return int(batch.extend_lens[~batch.is_row].sum())


def _kept(elapsed_s: float) -> float:
    return math.exp(-elapsed_s / BUSY_MEMORY_S)
