"""Whether a medium is asked: not for a while after it has failed, then once, and again when that went well. Pure.

The circuit breaker of Nygard, "Release It!" (2007): closed, open, half-open. The pause doubles with each failure.
"""

from __future__ import annotations

import math
from typing import Final

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0


class Breaker:
    """Tell it what went well and what did not."""

    def __init__(self) -> None:
        self.num_opened = 0  # since start
        self._pause_s = FIRST_PAUSE_S
        self._until_s = -math.inf  # it is open; -inf: closed
        self._is_tried = False  # it is half-open, and somebody asks

    @property
    def is_closed(self) -> bool:
        return self._until_s == -math.inf

    def allows(self, now_s: float) -> bool:
        """Whether the medium may be asked now."""
        return now_s >= self._until_s

    def begin(self, now_s: float) -> None:
        """The medium is asked: of one that is half-open nobody else asks until that has ended, or for a pause."""
        if not self.is_closed:
            self._is_tried, self._until_s = True, now_s + self._pause_s

    def fail(self, now_s: float) -> bool:
        """Return whether that is news: who was asked before it was known says nothing new."""
        if self.is_closed:
            self.num_opened += 1
        elif self._is_tried:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        else:
            return False
        self._is_tried, self._until_s = False, now_s + self._pause_s
        return True

    def succeed(self) -> None:
        self._is_tried, self._until_s, self._pause_s = False, -math.inf, FIRST_PAUSE_S
