"""A token bucket that may be overdrawn: what a request will cost is often known only when it is over. Pure."""

from __future__ import annotations


class Bucket:
    """Holds up to a minute's allowance, refilled steadily."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level: float = per_minute
        self._seen_s = now_s

    def resize(self, per_minute: int, now_s: float) -> None:
        """Change the allowance; what was used stays used."""
        self._refill(now_s)
        self._level += per_minute - self._per_minute
        self._per_minute = per_minute

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return how long it takes until `amount` is there; 0 if it is."""
        self._refill(now_s)
        return max(0.0, amount - self._level) * 60 / self._per_minute

    def take(self, amount: float, now_s: float) -> None:
        """Take `amount`, whether it is there or not. Less than nothing is given back."""
        self._refill(now_s)
        self._level -= amount

    def _refill(self, now_s: float) -> None:
        refilled = self._level + (now_s - self._seen_s) * self._per_minute / 60
        self._level = min(float(self._per_minute), refilled)
        self._seen_s = now_s
