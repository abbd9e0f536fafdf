"""Pools of workers as an autoscaler sees them, second by second: work comes, workers do it, pods start and drain. Pure.

A new pod serves after `start_s`. When a pool shrinks, pods that do not serve yet go first, then the emptiest: it takes
nothing more, and ends when it has nothing left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar

from scaling.autoscaler import Measure

BUSY_MEMORY_S: Final = 60.0  # of the share of time in which a worker computes prompts: as a worker measures it


class Worker(Protocol):
    """One pod."""

    @property
    def load(self) -> float:
        """0: it has nothing to do."""
        ...

    def advance(self, now_s: float) -> None:
        """Work until a second later."""
        ...


W = TypeVar("W", bound=Worker)


class Pods(Generic[W]):
    """The pods of a pool. `serving` take work; those that leave finish what they have."""

    def __init__(self, size: int, new: Callable[[], W], start_s: float) -> None:
        self._new = new
        self._start_s = start_s
        self._starting: deque[tuple[float, W]] = deque()  # and when it serves
        self._leaving: list[W] = []
        self.serving = [new() for _ in range(size)]

    @property
    def size(self) -> int:
        return len(self.serving) + len(self._starting)

    def advance(self, now_s: float) -> None:
        while self._starting and self._starting[0][0] <= now_s:
            self.serving.append(self._starting.popleft()[1])
        for worker in (*self.serving, *self._leaving):
            worker.advance(now_s)
        self._leaving = [worker for worker in self._leaving if worker.load]

    def resize(self, size: int, now_s: float) -> None:
        while self.size < size:
            self._starting.append((now_s + self._start_s, self._new()))
        while self.size > size:
            if self._starting:
                self._starting.pop()
            else:
                victim = min(self.serving, key=lambda worker: worker.load)
                self.serving.remove(victim)
                self._leaving.append(victim)


class PrefillWorker:
    """Computes one prompt after the other."""

    def __init__(self) -> None:
        self.load = 0.0  # seconds of prompts
        self.busy = 0.0

    def advance(self, now_s: float) -> None:
        worked_s = min(1.0, self.load)
        self.load -= worked_s
        keep = math.exp(-1 / BUSY_MEMORY_S)
        self.busy = self.busy * keep + worked_s * (1 - keep)


class PrefillPool:
    """Takes prompts by the seconds that they take to compute; each goes to the shortest queue."""

    def __init__(self, size: int, start_s: float, backlog_target_s: float, busy_target: float) -> None:
        self.pods = Pods(size, PrefillWorker, start_s)
        self._targets = backlog_target_s, busy_target
        self.waits_s: list[float] = []  # until the first token

    def step(self, prompts_s: Iterable[float], now_s: float) -> None:
        self.pods.advance(now_s)
        for prompt_s in prompts_s:
            worker = min(self.pods.serving, key=lambda each: each.load)
            worker.load += prompt_s
            self.waits_s.append(worker.load)

    def measures(self) -> list[Measure]:
        """Backlog, and how busy."""
        backlog_s = sum(worker.load for worker in self.pods.serving)
        busy = sum(worker.busy for worker in self.pods.serving)
        return [Measure(total, target) for total, target in zip((backlog_s, busy), self._targets, strict=True)]


class DecodeWorker:
    """Holds the KV of its requests until their outputs end."""

    def __init__(self) -> None:
        self.load = 0.0  # share of its KV pages
        self._held: list[tuple[float, float]] = []  # end of a request, its share

    @property
    def num_running(self) -> int:
        return len(self._held)

    def advance(self, now_s: float) -> None:
        self._held = [each for each in self._held if each[0] > now_s]
        self.load = sum(share for _, share in self._held)

    def hold(self, ends_s: float, share: float) -> None:
        self._held.append((ends_s, share))
        self.load += share


class DecodePool:
    """Takes requests by their seconds and their share of a worker's pages; each goes where most are free, or waits."""

    def __init__(self, size: int, start_s: float, occupancy_target: float) -> None:
        self.pods = Pods(size, DecodeWorker, start_s)
        self._target = occupancy_target
        self._waiting: deque[tuple[float, float, float]] = deque()  # arrival, seconds, share
        self.waits_s: list[float] = []  # for pages

    def step(self, requests: Iterable[tuple[float, float]], now_s: float) -> None:
        self.pods.advance(now_s)
        self._waiting += [(now_s, lasts_s, share) for lasts_s, share in requests]
        while self._waiting:
            came_s, lasts_s, share = self._waiting[0]
            worker = min(self.pods.serving, key=lambda each: each.load)
            if worker.load + share > 1:
                break
            worker.hold(now_s + lasts_s, share)
            self.waits_s.append(now_s - came_s)
            self._waiting.popleft()

    def measures(self) -> list[Measure]:
        """KV demand: what requests hold, and those that wait will, if they are like the others."""
        occupancy = sum(worker.load for worker in self.pods.serving)
        num_running = sum(worker.num_running for worker in self.pods.serving)
        return [Measure(occupancy * (1 + len(self._waiting) / max(1, num_running)), self._target)]
