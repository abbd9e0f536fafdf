"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.values.request import Request


class FirstComeFirstServed:
    """Implements `Policy`."""

    def rank(self, request: Request) -> float:
        return request.life.arrival_s

    def choose(self, line: Sequence[Request], now_s: float) -> Request:
        return line[0]
