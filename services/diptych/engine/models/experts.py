"""The networks of a mixture one after the other, for processors that multiply one matrix at a time.

Rule: what experts return is added up in the order of their numbers, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.engine.models.matrix import Matrix


@dataclass(frozen=True, slots=True)
class ExpertsInTurn:
    """`Experts` of any matrices. It waits for the counts of each expert's tokens, so no graph can capture it."""

    gate_up: Sequence[Matrix]
    down: Sequence[Matrix]
    ffn_size: int  # of one expert
    activate: Callable[[Tensor, Tensor], None]

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        order = chosen.flatten().argsort(stable=True)
        tokens, ordered_shares = order // chosen.shape[1], shares.flatten()[order, None]
        counts = chosen.flatten().bincount(minlength=len(self.down)).tolist()
        out.zero_()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                mine = tokens[start : start + count]
                result = self._compute(expert, x[mine])
                out.index_add_(0, mine, result.mul_(ordered_shares[start : start + count]))
                start += count

    def _compute(self, expert: int, x: Tensor) -> Tensor:
        gate_up, activated = x.new_empty(len(x), 2 * self.ffn_size), x.new_empty(len(x), self.ffn_size)
        out = torch.empty_like(x)
        self.gate_up[expert].multiply(x, gate_up)
        self.activate(gate_up, activated)
        self.down[expert].multiply(activated, out)
        return out
