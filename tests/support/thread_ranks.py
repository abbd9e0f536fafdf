"""Tensor-parallel ranks as threads of one process."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Meeting:
    """Where the ranks of a test, threads of one process, exchange tensors."""

    def __init__(self, size: int) -> None:
        self.brought: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.brought[rank] = x.clone()
        self.barrier.wait()
        all_of_them = [each for each in self.brought if each is not None]
        self.barrier.wait()
        return all_of_them


class ThreadCommunicator:
    """Implements `Communicator` for one of the threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = len(meeting.brought)
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._meeting.exchange(self.rank, x)).sum(0))

    def gather(self, x: Tensor) -> list[Tensor] | None:
        parts = self._meeting.exchange(self.rank, x)
        return parts if self.rank == 0 else None

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._meeting.exchange(self.rank, x)[0])

    def smallest(self, number: int) -> int:
        return min(int(each) for each in self._meeting.exchange(self.rank, torch.tensor(number)))
