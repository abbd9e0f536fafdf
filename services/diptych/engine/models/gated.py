"""The first half of a feed-forward network: gates and ups of each token, multiplied once the gates are activated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from diptych.engine.loader.config import Activation

if TYPE_CHECKING:  # an `Ops` has these
    from diptych.engine.models.ops import Activate, Matrix, Ops


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


def activate_of(ops: Ops, activation: Activation) -> Activate:
    """Return the function called `activation`."""
    return {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_tanh_and_mul}[activation]
