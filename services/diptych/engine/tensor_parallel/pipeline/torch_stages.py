"""How hidden states go from stage to stage of a pipeline: from each rank to the one of the same number behind it.

A stage sends and goes on with its next step, which the stages behind are still to begin: so chunks of a prompt are in
flight, one in each stage. It waits before it sends the one after: no stage is further ahead than that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class TorchStages:
    """Implements `Stages` over torch.distributed."""

    def __init__(self, rank: int, num_ranks: int, size: int) -> None:
        """`rank`: of all; each of `size` stages has `num_ranks`."""
        self.number, self.size = rank // num_ranks, size
        self._before, self._behind = rank - num_ranks, rank + num_ranks
        self._last_leader = (size - 1) * num_ranks  # which has the logits, for rank 0
        self._rank = rank
        self._sending: tuple[Any, Tensor] | None = None  # and what is on its way, which must not go before it has left

    def meet(self, device: torch.device) -> None:
        """Connect, while the store is there by which NCCL does."""
        x = torch.zeros(1, 1, device=device)
        if self.number:
            self.receive(x)
        if self.number < self.size - 1:
            self.send(x)
        self.bring_back(x)

    def receive(self, x: Tensor) -> None:
        dist.recv(x, self._before)

    def send(self, x: Tensor) -> None:
        if self._sending is not None:
            self._sending[0].wait()
        self._sending = dist.isend(x, self._behind), x

    def bring_back(self, logits: Tensor) -> None:
        if not len(logits):
            return
        if self._rank == self._last_leader:
            dist.send(logits, 0)
        elif self._rank == 0:
            dist.recv(logits, self._last_leader)
