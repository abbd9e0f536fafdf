"""How long workers take from being asked for to being ready, as was seen lately. Pure: it is told the time."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from diptych.planner.values import WorkerState

MOST: Final = 7  # starts
_COMING: Final = (WorkerState.PENDING, WorkerState.STARTING)


@dataclass(slots=True)
class StartTimes:
    """Watches workers come. Those that were coming when it first looked tell nothing: nobody knows since when."""

    _coming_s: dict[str, float] | None = None  # since when; None: it has not looked yet
    _took_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST))

    def look(self, now_s: float, states: Mapping[str, WorkerState]) -> None:
        """See all workers, by names that they keep from being asked for to being ready."""
        known = self._coming_s
        coming = [name for name, state in states.items() if state in _COMING]
        if known is None:
            self._coming_s = dict.fromkeys(coming, -1.0)
            return
        came = [known[name] for name, state in states.items() if state is WorkerState.READY and name in known]
        self._took_s.extend(now_s - since_s for since_s in came if since_s >= 0)
        self._coming_s = {name: known.get(name, now_s) for name in coming}

    def usual_s(self, at_least: float) -> float:
        """Return the median of the last starts, or `at_least`: where an image is fetched the next one takes longer."""
        return max(at_least, statistics.median(self._took_s)) if self._took_s else at_least
