"""How a worker hands KV over: what is verified, how long it may take, and whether it follows the forward pass."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from diptych.common.errors import ConfigError
from diptych.kvtransfer.flow import Flow

if TYPE_CHECKING:
    from diptych.engine.values.request import Request

Integrity = Literal["off", "sampled", "always"]

Window = tuple[int, int]  # layers [first, end)

SAMPLED: Final = 16  # one room of so many is verified, by its random id
MIN_PIECE_NBYTES: Final = 64 << 10  # of a page: below it a transfer engine pays more a piece than overlap saves


@dataclass(frozen=True, slots=True)
class TransferRules:
    """The same for all rooms of a worker."""

    integrity: Integrity = "sampled"  # which hand-offs carry a digest; decode verifies what has one
    timeout_s: float = 30.0  # of one write, and from the hand-off to decode's answer
    num_windows: int = 1  # of layers, in which the last chunk's pages leave behind the forward pass; 1: after it
    pulls: bool = False  # whether prefixes that other workers have are pulled from them, and lent to them

    def validate(self) -> None:
        """Raise `ConfigError` for what can't be meant, by the names of the options."""
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"--kv-transfer-timeout-s must be above 0, not {self.timeout_s:g}")
        if self.num_windows < 1:
            raise ConfigError(f"--kv-layer-windows must be at least 1, not {self.num_windows}")

    @property
    def by_layers(self) -> bool:
        return self.num_windows > 1

    def flow(self, request: Request, now_s: float) -> Flow:
        """Return how what `request` writes now travels. No write outlives the request's own deadline by much."""
        left_s = min(self.timeout_s, request.life.deadline_s - now_s)
        return Flow(
            stream=request.room,
            priority=request.account.priority,
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


def layer_windows(num_layers: int, num_windows: int, page_nbytes: int) -> tuple[Window, ...]:
    """Return windows of about equal size that cover all layers: fewer than wanted if pieces would get too small."""
    count = max(1, min(num_windows, num_layers, page_nbytes // MIN_PIECE_NBYTES))
    ends = [num_layers * i // count for i in range(count + 1)]
    return tuple(itertools.pairwise(ends))
