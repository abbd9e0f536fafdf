"""Decides what happens when a component dies while serving: start it again, a little later each time, or give up.

Pure: it is given the times of all deaths and returns a decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the component again after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It dies too often; stop everything."""

    num_deaths: int
    window_s: float


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Gives up at `max_deaths` within `window_s`; delays double from `first_delay_s` up to `max_delay_s`."""

    max_deaths: int = 5
    window_s: float = 30.0
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0

    def decide(self, deaths_s: Sequence[float]) -> Restart | GiveUp:
        """Return what to do after the last of `deaths_s`, which ascend. Deaths before the window are forgiven."""
        recent = sum(1 for death_s in deaths_s if death_s > deaths_s[-1] - self.window_s)
        if recent >= self.max_deaths:
            return GiveUp(recent, self.window_s)
        return Restart(min(self.first_delay_s * 2 ** (recent - 1), self.max_delay_s))
