"""A planner that remembers: what a simulation or a process asks again and again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from diptych.planner.plan import plan
from diptych.planner.values import Memory, Observed, Plan

EVERY_S: Final = 15.0  # between rounds


@dataclass(slots=True)
class Planner:
    """Asks `plan`, round after round, and keeps its memory."""

    every_s: float = EVERY_S
    memory: Memory = field(default_factory=Memory)

    def __call__(self, observed: Observed) -> Plan:
        made, self.memory = plan(observed, self.memory)
        return made
