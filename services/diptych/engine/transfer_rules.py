"""How a worker hands KV over: what is verified, how long it may take, and whether it follows the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from diptych.engine.request import Request
from diptych.kvtransfer.transport import Flow

Integrity = Literal["off", "sampled", "always"]

SAMPLED: Final = 16  # one room of so many is verified, by its random id


@dataclass(frozen=True, slots=True)
class TransferRules:
    """The same for all rooms of a worker."""

    integrity: Integrity = "sampled"  # which hand-offs carry a digest; decode verifies what has one
    timeout_s: float = 30.0  # of one write, and from the hand-off to decode's answer
    by_layers: bool = False  # the last chunk's pages leave behind the forward pass, some layers at a time

    def flow(self, request: Request, now_s: float) -> Flow:
        """Return how what `request` writes now travels. No write outlives the request's own deadline by much."""
        left_s = self.timeout_s if request.deadline_s is None else min(self.timeout_s, request.deadline_s - now_s)
        return Flow(
            stream=request.room,
            priority=request.priority,
            timeout_s=max(0.0, left_s),
            with_digest=self.is_verified(request.room),
        )

    def is_verified(self, room: int) -> bool:
        match self.integrity:
            case "off":
                return False
            case "sampled":
                return room % SAMPLED == 0
            case "always":
                return True
