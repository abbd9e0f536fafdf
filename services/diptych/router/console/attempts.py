"""Decides whether another attempt may be made after those that failed. Pure; the caller passes the time."""

from __future__ import annotations

from collections import deque


class Attempts:
    """Failed attempts of late, of everybody together: `most` of them in `window_s`."""

    def __init__(self, most: int, window_s: float) -> None:
        self._window_s = window_s
        self._failed_s: deque[float] = deque(maxlen=most)

    def wait_s(self, now_s: float) -> float:
        """Return how long until another one may be made; 0: now."""
        if len(self._failed_s) < (self._failed_s.maxlen or 0):
            return 0.0
        return max(0.0, self._failed_s[0] + self._window_s - now_s)

    def fail(self, now_s: float) -> None:
        """Another one has failed."""
        self._failed_s.append(now_s)
