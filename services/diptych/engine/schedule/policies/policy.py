"""What a schedule policy is: the order in which one tenant's waiting requests are admitted.

Rule: no starvation. A policy ranks a request by instants that stay fixed, so that whoever arrives much later ranks
behind it, whatever else it is; what `choose` prefers over the first in line must be bounded in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from diptych.engine.values.request import Request


class Policy(Protocol):
    """Orders waiting requests."""

    def rank(self, request: Request) -> float:
        """Return the request's place in line, smaller first. Asked once, when it arrives."""
        ...

    def choose(self, line: Sequence[Request], now_s: float) -> Request:
        """Return whom to admit next of the first in line, at least one, which are in order of rank."""
        ...
