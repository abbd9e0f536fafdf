"""Bounds what bootstrap accepts from its clients; everything beyond is refused with RESOURCE_EXHAUSTED. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.common.errors import Overloaded

MAX_MESSAGE_BYTES: Final = 256 * 2**10
HEARTBEATS_PER_S: Final = 50  # a stream may send so many on average
BURST: Final = 100
WATCHERS_EACH: Final = 16  # an instance has one, and some that have broken unnoticed


@dataclass(frozen=True, slots=True)
class Limits:
    """How much it serves at a time."""

    max_instances: int = 8_000
    max_watchers: int = 8_000


class Pace:
    """Counts what comes on one stream."""

    def __init__(self, now_s: float) -> None:
        self._credit = float(BURST)
        self._counted_s = now_s

    def count(self, now_s: float) -> None:
        """Raise `Overloaded` if heartbeats come too fast."""
        self._credit = min(BURST, self._credit + (now_s - self._counted_s) * HEARTBEATS_PER_S) - 1
        self._counted_s = now_s
        if self._credit < 0:
            raise Overloaded(f"more than {HEARTBEATS_PER_S} heartbeats a second on one stream")
