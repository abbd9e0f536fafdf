"""Prompts of one kind, as steps compute them: what they take, what is worth a step, and how long they wait. Pure.

`Prompts` keeps that of prompts computed beside tokens, or in steps of their own; `PromptShare` which share of the time
prompts took of late while outputs waited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diptych.engine.schedule.pace.step_times import NEAR, StepLine

PATIENCE: Final = 8  # steps
COMPUTED: Final = 1.25  # times what reading the weights takes: then a step took as long as its products
ORIGIN: Final = 1.0  # steps: so much counts, against those that are remembered, that no prompt takes no time
MEMORY_S: Final = 5.0  # of which share of the time prompts take


class NextPrompt(NamedTuple):
    """A prompt whose turn it is."""

    room: int
    due_s: float  # its first token; infinite: nobody said when
    cost: int  # of what is left of it
    weight: float  # of missing that, beside what outputs weigh
    queued: int  # tokens of all that wait with it
    num_waiting: int  # prompts, with it
    place: tuple[bool, float]  # in the order of all that wait here: those that may be in time, by when they came
    is_idle_work: bool = False  # it is behind all others, and so are all that wait


@dataclass(slots=True)
class Prompts:
    """Prompts of one kind: computed beside tokens, or in steps of their own.

    A step reads all weights, and computes meanwhile: it takes the longer of the two (the roofline). Beside tokens,
    which read the weights anyway, prompts take what their products take beyond `read_s`. But a step with both takes
    `floor_s` longer than one without prompts (`MixedFloor`): fewer than take so long are not worth it. What is left
    until there is time for more is no loss, as deadlines are sums.
    """

    least: int  # that is worth a step
    line: StepLine = field(default_factory=lambda: StepLine(ORIGIN))  # the seconds of steps but for tokens
    read_s: float = 0.0  # of reading weights, where tokens need them, too
    floor_s: float = 0.0  # that any take, as of the next step
    num_refused: int = 0  # steps with tokens since they had some of one
    is_refused: bool = False  # they want some of the next, and don't get it

    def cost_in(self, seconds: float) -> int:
        """Return what prompts may cost that take so long."""
        if not self.line.is_known:
            return self.least if seconds > 0 else 0  # to find out
        if 0.0 < self.floor_s > seconds:
            return 0
        return max(0, self.line.work_in(seconds + self.read_s))

    def seconds_of(self, cost: int) -> float:
        """Return how long prompts of such a cost take."""
        return max(self.floor_s, self.line.at(cost) - self.read_s)

    @property
    def at_floor(self) -> int:
        """What prompts cost that take no longer than any."""
        return self.line.work_in(self.floor_s + self.read_s) if self.floor_s else 0

    def learn(self, cost: int, seconds: float, reach: int) -> None:
        """A step with prompts of such a cost took so long but for tokens, and with reading the weights.

        Where reading the weights took most of it, products took no longer; it tells more only if they were to. But if
        it had about all that is believed to be known of, up to `reach`, it is learned: else none would have more.
        """
        if NEAR * cost > reach or seconds > COMPUTED * self.read_s or self.line.at(cost) > seconds:
            self.line.learn(cost, seconds)

    def enough(self, wanted: int) -> int:
        """Return what is worth a step, where so much waits."""
        if not self.line.is_known:
            return min(self.least, wanted)
        return min(max(self.least, self.at_floor), wanted, self.line.reach)

    def patient(self, budget: int, enough: int, at_last: int) -> int:
        """Return what they get where so much would be right: nothing where that is too little, but not for ever."""
        if budget >= enough:
            return budget
        self.is_refused = True
        return max(at_last, budget) if self.num_refused + 1 >= PATIENCE else 0

    def stepped(self, has_tokens: bool, cost: int) -> None:
        if has_tokens and not cost and self.is_refused:
            self.num_refused += 1
        elif cost or has_tokens:
            self.num_refused = 0
        if cost or has_tokens:
            self.is_refused = False


class PromptShare:
    """Which share of the time prompts took of late, while outputs waited."""

    def __init__(self) -> None:
        self._prompts_s = self._seconds = 0.0  # that steps took of late while outputs waited, and those for prompts
        self._unnoted_s = 0.0  # of steps without prompts that are in neither yet

    @property
    def now(self) -> float:
        self._note_unnoted()
        return max(0.0, self._prompts_s / self._seconds) if self._seconds else 0.0

    def note_plain(self, seconds: float) -> None:
        """Steps without prompts took so long. They are noted together: what they do depends on their time alone."""
        self._unnoted_s += seconds

    def note(self, took_s: float, prompts_s: float) -> None:
        """A step with prompts took so long, and so much of it for these."""
        self._note_unnoted()
        self._note(took_s, prompts_s)

    def _note_unnoted(self) -> None:
        self._note(self._unnoted_s, 0.0)
        self._unnoted_s = 0.0

    def _note(self, took_s: float, prompts_s: float) -> None:
        if took_s > 0:
            kept = math.exp(-took_s / MEMORY_S)
            gained_s = MEMORY_S * (1 - kept)
            self._seconds = self._seconds * kept + gained_s
            self._prompts_s = self._prompts_s * kept + gained_s * prompts_s / took_s
