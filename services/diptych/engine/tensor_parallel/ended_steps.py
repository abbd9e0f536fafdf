"""Which steps all ranks have ended: what rank 0 knows by its own results, and what it has to ask.

Ranks add up what each layer makes. So where logits are made on rank 0, every rank is done with the attention of its
last layer, and with whatever it was told before. Two things are not told by logits: a step without any ends on a rank
as soon as that is done with its own last attention, and for what a rank writes behind its logits nobody waits. Pages
that rank 0 knows to be free have been written by steps that it has ended itself, so others are never waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from diptych.engine.values.batch import DraftModel, ForwardBatch, OverlapRunner, WaitForEnd

_MOST: Final = 2  # steps that a runner may have begun, when rank 0 has ended the first of them


class FollowedRunner(OverlapRunner, Protocol):
    """A runner, and what guesses for its model."""

    @property
    def draft_model(self) -> DraftModel | None:
        """What computes its steps behind it; None: only what needs no model guesses."""
        ...


def tells_of_all(batch: ForwardBatch, *, is_followed: bool) -> bool:
    """Whether the result of a step on rank 0 says that every rank has ended it.

    `is_followed`: a draft model computes what steps do, behind them.
    """
    writes_behind = (batch.states is not None and len(batch.states.written_slots)) or (
        is_followed and batch.is_followed
    )
    return not writes_behind and batch.num_samples > 0


class EndedSteps:
    """Rank 0's count. Steps are numbered from 1, as they stand in the log."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._num_own = 0  # ended on rank 0
        self._num_common = 0  # known to have ended on all ranks

    def begin(self) -> int:
        """Return the number of a step that is begun."""
        self.num_begun += 1
        return self.num_begun

    def end(self, number: int) -> None:
        """The first `number` steps have ended on rank 0."""
        self._num_own = max(self._num_own, number)

    def end_on_all(self, number: int) -> None:
        """They have ended on every rank."""
        self.end(number)
        self._num_common = max(self._num_common, number)

    def to_ask(self) -> int | None:
        """Return up to which step the other ranks have to be asked; None: all have ended those that rank 0 has."""
        return self._num_own if self._num_own > self._num_common else None


class RankSteps:
    """Another rank's count of the same steps, and how to wait for those that rank 0 may ask for."""

    def __init__(self) -> None:
        self._num_begun = 0
        self._ends: deque[tuple[int, WaitForEnd]] = deque(maxlen=_MOST)

    def begun(self, batch: ForwardBatch, new_end: Callable[[], WaitForEnd], *, is_followed: bool) -> None:
        """A step was begun. Its end is marked by `new_end` where rank 0 may ask for it."""
        self._num_begun += 1
        if not tells_of_all(batch, is_followed=is_followed):
            self._ends.append((self._num_begun, new_end()))

    def finish(self, number: int) -> None:
        """Return when the first `number` steps have ended here."""
        wait = next((wait for begun, wait in self._ends if begun >= number), None)
        assert wait is not None, f"rank 0 asks for step {number}, whose end this rank did not mark"
        wait()
