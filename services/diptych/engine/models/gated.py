"""The first half of a feed-forward network: gates and ups of each token, multiplied once the gates are activated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from diptych.engine.models.matrix import Activate, Matrix


class Gated(Protocol):
    """A matrix `[2 * ffn_size, hidden_size]`, gates first, and an activation."""

    def forward(self, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        """`[num_tokens, hidden_size]` -> `[num_tokens, ffn_size]`; `gate_up`, twice as wide, may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class GatedInTurn:
    """Implements `Gated` by any matrix and what activates its products."""

    matrix: Matrix
    activate: Activate

    def forward(self, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        self.matrix.multiply(x, gate_up)
        self.activate(gate_up, out)
