"""Tensor-parallel ranks as threads of one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from diptych.engine.tensor_parallel.sum_rule import SumRule
from diptych.kernels.cpu import elementwise

T = TypeVar("T")


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

    experts: Any = None
    stages: Any = None

    def __init__(self, rank: int, meeting: Meeting, rule: SumRule | None = None, *, fuses: bool = False) -> None:
        """`fuses`: sums and norms in one call, as GPUs have it."""
        self.rank = rank
        self._rule = rule or SumRule(len(meeting.brought), None)
        self._fuses = fuses
        self.calls = Counter[str]()
        self.size = len(meeting.brought)
        self._meeting = meeting

    def scatters(self, num_tokens: int, row_nbytes: int) -> bool:
        return self._rule.scatters(num_tokens, row_nbytes)

    def all_reduce(self, x: Tensor) -> None:
        self.calls["all_reduce"] += 1
        x.copy_(self._sum(x))

    def all_reduce_add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> bool:
        if self._fuses:
            self.calls["fused"] += 1
            elementwise.add_rms_norm(x, self._sum(delta), weight, eps, out)
        return self._fuses

    def reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        self.calls["reduce_scatter"] += 1
        out.copy_(self._sum(x).view(self.size, *out.shape)[self.rank])

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        self.calls["all_gather"] += 1
        out.copy_(torch.cat(self._meeting.exchange(self.rank, part)))

    def _sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchange(self.rank, x)).sum(0)

    def of_one_stage(self) -> ThreadCommunicator:
        alone = copy(self)
        alone.stages = None
        return alone

    def gather(self, x: Tensor) -> list[Tensor] | None:
        parts = self._meeting.exchange(self.rank, x)
        return parts if self.rank == 0 else None

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._meeting.exchange(self.rank, x)[0])

    def smallest(self, number: int) -> int:
        return min(int(each) for each in self._meeting.exchange(self.rank, torch.tensor(number)))


class ThreadStages:
    """Implements `Stages` for one of the threads: each is a stage of one rank."""

    def __init__(self, number: int, lines: Sequence[SimpleQueue[Tensor]]) -> None:
        """`lines`: one from each stage to the next, and from the last to the first."""
        self.number, self.size = number, len(lines)
        self._lines = lines

    def receive(self, x: Tensor) -> None:
        x.copy_(self._lines[self.number - 1].get(timeout=60))

    def send(self, x: Tensor) -> None:
        self._lines[self.number].put(x.clone())

    def bring_back(self, logits: Tensor) -> None:
        if not len(logits):
            return
        if self.number == self.size - 1:
            self._lines[-1].put(logits.clone())
        elif not self.number:
            logits.copy_(self._lines[-1].get(timeout=60))


def new_lines(num_stages: int) -> list[SimpleQueue[Tensor]]:
    return [SimpleQueue() for _ in range(num_stages)]


def on_stages(num_stages: int, work: Callable[[ThreadCommunicator], T]) -> T:
    """Run `work` on every stage, each in a thread; return what the first one returns."""
    lines = new_lines(num_stages)

    def run(number: int) -> T:
        communicator = ThreadCommunicator(0, Meeting(1))
        communicator.stages = ThreadStages(number, lines)
        return work(communicator)

    with ThreadPoolExecutor(num_stages) as pool:
        return next(iter(pool.map(run, range(num_stages))))


def on_threads(size: int, work: Callable[[int, Meeting], T]) -> list[T]:
    """Run `work` on every rank, each in a thread; return what each returns."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(rank, meeting)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
