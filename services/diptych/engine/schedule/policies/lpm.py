"""Longest prefix match first: what is cached now is used before it is evicted.

Only the first in line are compared, and the first of all goes as soon as it has waited `PATIENCE_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from diptych.engine.values.request import Request

PATIENCE_S: Final = 5.0


class LongestPrefixMatch:
    """Implements `Policy`. `cached_len` tells how many tokens of a request the prefix cache has now."""

    def __init__(self, cached_len: Callable[[Request], int]) -> None:
        self._cached_len = cached_len

    def rank(self, request: Request) -> float:
        return request.life.arrival_s

    def choose(self, line: Sequence[Request], now_s: float) -> Request:
        if len(line) == 1 or line[0].life.arrival_s + PATIENCE_S <= now_s:
            return line[0]
        return max(line, key=self._cached_len)  # of equal ones the first
