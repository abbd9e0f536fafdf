"""Decides which texts are worth a write: those that come again, and long ones. Pure.

A text that was used twice while it was cached is known to come again. One that was evicted before it came again is not,
so the names of what was turned away are kept for a while: the doorkeeper of Einziger, Friedman and Manes, "TinyLFU"
(2017), as two generations of names, of which the older one goes as a whole.
"""

from __future__ import annotations

from typing import Final

from diptych.common.arrays import U64

SECOND_USE: Final = 2  # of a text: who comes twice may come again
LONG_TOKENS: Final = 2048  # of a text that is worth a write at its first use


class Doorkeeper:
    """Remembers up to `capacity` names of pages that were turned away."""

    def __init__(self, capacity: int) -> None:
        self._half = max(1, capacity // 2)
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def admits(self, names: U64, num_uses: int, num_tokens: int) -> bool:
        """Whether a run of pages is let in; `num_tokens`: of the text up to its end."""
        if num_uses >= SECOND_USE or num_tokens >= LONG_TOKENS:
            return True
        first = int(names[0])
        if first in self._newer or first in self._older:
            return True
        self._newer.update(names.tolist())
        if len(self._newer) >= self._half:
            self._older, self._newer = self._newer, set()
        return False
