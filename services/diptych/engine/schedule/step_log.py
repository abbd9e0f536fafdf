"""What each step of a scheduler did, noted while somebody watches. Pure.

Nobody watches as a rule: then a step costs one look at `is_on`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diptych.engine.values.events import Crossing
from diptych.engine.values.step_model import StepShape

MAX_STEPS: Final = 4096  # that are kept until they are told


class StepSize(NamedTuple):
    """What a step computes."""

    prompt_tokens: int
    output_tokens: int  # of requests that go on: the first one of a prompt is the prompt's
    num_requests: int
    context_tokens: int = 0  # see `StepShape`
    prompt_pairs: float = 0.0
    num_prompts: int = 0

    @staticmethod
    def of(shape: StepShape, num_prompt_tokens: int, num_requests: int) -> StepSize:
        """`num_prompt_tokens`: with those that are computed as rows."""
        return StepSize(
            num_prompt_tokens,
            shape.num_rows,
            num_requests,
            shape.context_tokens,
            shape.prompt_pairs,
            shape.num_prompts,
        )


class LoggedStep(NamedTuple):
    """A step that has ended."""

    began_s: float
    duration_s: float
    size: StepSize
    host_s: float = 0.0  # before it, since the end of another one, while there was work: the scheduler's own


@dataclass(slots=True)
class LoggedSteps:
    """Steps in the order of their ends, and who crossed to another worker in them."""

    steps: list[LoggedStep] = field(default_factory=list)
    marks: list[tuple[Crossing, int, int]] = field(default_factory=list)  # which way, index of the step, room
    num_dropped: int = 0  # steps that there was no room for


class StepLog:
    """Tell it of steps as they end; take what it has noted."""

    def __init__(self) -> None:
        self.is_on = False
        self._noted = LoggedSteps()

    def switch(self, is_on: bool) -> None:
        """Note steps from now on, or no more: then what was noted is forgotten."""
        self.is_on = is_on
        if not is_on:
            self._noted = LoggedSteps()

    def add(self, step: LoggedStep) -> None:
        """A step has ended that was to be noted when it began."""
        if not self.is_on:
            return
        if len(self._noted.steps) < MAX_STEPS:
            self._noted.steps.append(step)
        else:
            self._noted.num_dropped += 1

    def mark(self, crossing: Crossing, room: int) -> None:
        """A room has crossed in the step that ended last."""
        noted = self._noted
        if noted.steps and not noted.num_dropped:
            noted.marks.append((crossing, len(noted.steps) - 1, room))

    def pop(self) -> LoggedSteps:
        """Return what has been noted since the last call."""
        noted, self._noted = self._noted, LoggedSteps()
        return noted
