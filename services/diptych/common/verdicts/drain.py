"""Decides how a worker or a router leaves, by a table. Only `Drain` assigns a phase; the caller passes the time.

    SERVING --asked--> DRAINING --last ended-----------------------------------> EMPTY
       |                  |                                                        ^
       |                  +--deadline passed, hurried--> HANDING_BACK --last ended-+
       +--hurried-----------------------------------------^

Every phase --process ends--> GONE. A deadline only ever moves closer: the shortest time that was asked for holds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diptych.common.errors import moved


class Phase(enum.Enum):
    """How far it is."""

    SERVING = "serving"
    DRAINING = "draining"  # takes nothing new; what it has may finish
    HANDING_BACK = "handing back"  # what has not finished is done elsewhere; what can't move ends here
    EMPTY = "empty"  # holds nothing; may be ended
    GONE = "gone"


class Signal(enum.Enum):
    """What moves it along."""

    ASKED = "asked"
    DEADLINE_MOVED = "deadline moved"
    DEADLINE_PASSED = "deadline passed"
    HURRIED = "hurried"
    LAST_ENDED = "last request ended"
    PROCESS_ENDS = "process ends"


TRANSITIONS: Final[Mapping[tuple[Phase, Signal], Phase]] = {
    (Phase.SERVING, Signal.ASKED): Phase.DRAINING,
    (Phase.SERVING, Signal.HURRIED): Phase.HANDING_BACK,
    (Phase.SERVING, Signal.PROCESS_ENDS): Phase.GONE,
    (Phase.DRAINING, Signal.DEADLINE_MOVED): Phase.DRAINING,
    (Phase.DRAINING, Signal.DEADLINE_PASSED): Phase.HANDING_BACK,
    (Phase.DRAINING, Signal.HURRIED): Phase.HANDING_BACK,
    (Phase.DRAINING, Signal.LAST_ENDED): Phase.EMPTY,
    (Phase.DRAINING, Signal.PROCESS_ENDS): Phase.GONE,
    (Phase.HANDING_BACK, Signal.DEADLINE_MOVED): Phase.HANDING_BACK,
    (Phase.HANDING_BACK, Signal.HURRIED): Phase.HANDING_BACK,
    (Phase.HANDING_BACK, Signal.LAST_ENDED): Phase.EMPTY,
    (Phase.HANDING_BACK, Signal.PROCESS_ENDS): Phase.GONE,
    (Phase.EMPTY, Signal.DEADLINE_MOVED): Phase.EMPTY,
    (Phase.EMPTY, Signal.HURRIED): Phase.EMPTY,
    (Phase.EMPTY, Signal.PROCESS_ENDS): Phase.GONE,
    (Phase.GONE, Signal.DEADLINE_MOVED): Phase.GONE,
    (Phase.GONE, Signal.HURRIED): Phase.GONE,
}


def next_phase(phase: Phase, signal: Signal) -> Phase:
    """Move along `TRANSITIONS`; raise `InvalidTransition` where it has no entry."""
    return moved(TRANSITIONS, phase, signal, "drain")


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far a drain is, for people and programs."""

    phase: Phase
    requests_left: int
    oldest_s: float  # since the oldest of them began here
    deadline_s: float  # from now; 0 once it has passed


class Drain:
    """Where one departure is."""

    def __init__(self) -> None:
        self.phase = Phase.SERVING
        self.deadline_s = math.inf  # on the caller's clock

    def ask(self, deadline_s: float) -> None:
        """Leave by `deadline_s`; asked again, by the earlier of the two."""
        self._on(Signal.ASKED if self.phase is Phase.SERVING else Signal.DEADLINE_MOVED)
        self.deadline_s = min(self.deadline_s, deadline_s)

    def hurry(self, now_s: float) -> None:
        """Hand back what is left now."""
        self._on(Signal.HURRIED)
        self.deadline_s = min(self.deadline_s, now_s)

    def look(self, now_s: float, *, none_left: bool) -> None:
        """Take in what has become of time and requests."""
        if none_left and self.phase in (Phase.DRAINING, Phase.HANDING_BACK):
            self._on(Signal.LAST_ENDED)
        elif self.phase is Phase.DRAINING and self.deadline_s <= now_s:
            self._on(Signal.DEADLINE_PASSED)

    def end(self) -> None:
        """The process ends, whatever is left."""
        self._on(Signal.PROCESS_ENDS)

    def progress(self, now_s: float, requests_left: int, oldest_s: float) -> DrainProgress:
        return DrainProgress(self.phase, requests_left, oldest_s, max(0.0, self.deadline_s - now_s))

    def _on(self, signal: Signal) -> None:
        self.phase = next_phase(self.phase, signal)
