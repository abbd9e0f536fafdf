"""Earliest deadline first. A request without a deadline counts as if it had `PATIENCE_S`, and so never starves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from diptych.engine.values.request import Request

PATIENCE_S: Final = 600.0


class EarliestDeadline:
    """Implements `Policy`."""

    def rank(self, request: Request) -> float:
        life = request.life
        return life.arrival_s + PATIENCE_S if life.deadline_s == math.inf else life.deadline_s

    def choose(self, line: Sequence[Request], now_s: float) -> Request:
        return line[0]
