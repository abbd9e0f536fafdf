"""Highest priority first, with aging: every `AGING_S` seconds of waiting are worth one level of priority.

"Priority plus time waited" orders two requests the same way at any time, hence the rank is a fixed instant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from diptych.engine.values.request import Request

AGING_S: Final = 10.0


class Priority:
    """Implements `Policy`."""

    def rank(self, request: Request) -> float:
        return request.life.arrival_s - AGING_S * request.account.priority

    def choose(self, line: Sequence[Request], now_s: float) -> Request:
        return line[0]
