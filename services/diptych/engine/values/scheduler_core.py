"""What every scheduler core can do, whatever role it serves."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.core_report import CoreReport, Load
from diptych.engine.values.events import Effect, Event


class SchedulerCore(Protocol):
    """What decides in a scheduler process. Values in, values out; no I/O, no clock."""

    @property
    def can_overlap(self) -> bool:
        """Whether events may be handled, and the next step planned, while the step launched last runs."""
        ...

    @property
    def max_tokens(self) -> int:
        """What a request may have at most, prompt and output."""
        ...

    def handle(self, event: Event, now_s: float) -> None: ...

    def plan(self, now_s: float) -> ForwardBatch | None:
        """Choose and launch the next step; None when there is nothing to compute, or not before the next `commit`.

        At most two steps may be launched and not committed.
        """
        ...

    def sampling(self) -> SamplingBatch:
        """Say how to sample the step launched last, once those before it are committed."""
        ...

    def commit(self, result: StepResult, now_s: float) -> None:
        """Take what the oldest step launched gave."""
        ...

    def rooms_of_step(self) -> Set[int]:
        """The rooms for which the step computes that was launched last."""
        ...

    def give_up(self) -> None:
        """The only step that is launched will never be complete: all its rooms are about to be aborted."""
        ...

    def expire(self, now_s: float) -> None:
        """End what has passed its deadline."""
        ...

    def next_deadline_s(self) -> float | None: ...

    def suspects(self) -> set[int]:
        """Lost peers that might still write into our pool; each is answered by `WriterGone` once it can't."""
        ...

    def pop_effects(self) -> list[Effect]: ...

    def load(self) -> Load:
        """Say how busy it is: asked in every iteration of the loop."""
        ...

    def report(self) -> CoreReport:
        """Say the rest: asked when somebody wants to know."""
        ...
