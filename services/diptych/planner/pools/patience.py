"""When something that failed is tried again: after a pause that doubles with each failure in a row. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

FIRST_S: Final = 15.0
LONGEST_S: Final = 600.0
_MOST_DOUBLINGS: Final = 16  # whoever fails for weeks has the longest pause all the same


@dataclass(slots=True)
class Patience:
    """What failed lately, by name. The caller passes the time."""

    _failures: dict[Hashable, tuple[int, float]] = field(default_factory=dict)  # in a row, and when to try again

    def may_try(self, name: Hashable, now_s: float) -> bool:
        return now_s >= self._failures.get(name, (0, now_s))[1]

    def failed(self, name: Hashable, now_s: float) -> float:
        """Return for how long it is left alone."""
        number = self._failures.get(name, (0, 0.0))[0] + 1
        pause_s = min(LONGEST_S, FIRST_S * 2.0 ** min(number - 1, _MOST_DOUBLINGS))
        self._failures[name] = number, now_s + pause_s
        return pause_s

    def worked(self, name: Hashable) -> None:
        self._failures.pop(name, None)
