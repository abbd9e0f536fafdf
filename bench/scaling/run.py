"""Runs a pool under an autoscaler with requests that come at random. The same numbers everywhere."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol, TypeVar

from scaling.autoscaler import SYNC_S, Autoscaler, Measure
from scaling.pools import Pods

PROMPT_S: Final = 0.4  # mean time to compute a prompt: 4,000 tokens at 10,000 a second
OUTPUT_S: Final = 20.0  # mean time to generate an output
SHARE: Final = 0.01  # of a decode worker's pages that a request holds, mean
SPREAD: Final = 1.0  # of the logarithm of any of them: a few are ten times as long as most
SETTLED_S: Final = 120  # before which nothing is decided: a pool begins empty

Load = Callable[[int], float]  # in workers' worth, by the second
R = TypeVar("R", contravariant=True)


class Pool(Protocol[R]):
    """What is scaled: see `pools`."""

    pods: Pods[Any]
    waits_s: list[float]

    def step(self, requests: Sequence[R], now_s: float) -> None: ...

    def measures(self) -> Sequence[Measure]: ...


@dataclass(frozen=True, slots=True)
class Run:
    """What happened to one pool."""

    sizes: Sequence[int]  # each second
    waits_s: Sequence[float]  # of each request

    @property
    def changes(self) -> list[tuple[int, int]]:
        """When it changed, and by how much."""
        steps = [after - before for before, after in pairwise(self.sizes)]
        return [(second, step) for second, step in enumerate(steps, 1) if step]

    @property
    def num_turns(self) -> int:
        """How often it grew after it had shrunk, or shrank after it had grown."""
        return sum((one > 0) != (other > 0) for (_, one), (_, other) in pairwise(self.changes))

    def wait_s(self, share: float) -> float:
        """Return how long that share of all requests waited at most."""
        return sorted(self.waits_s)[int(share * (len(self.waits_s) - 1))]


def run(pool: Pool[R], requests: Iterator[Sequence[R]], scaler: Autoscaler | None, num_seconds: int) -> Run:
    """Run for so long; without a scaler the pool keeps its size."""
    sizes = []
    for second in range(num_seconds):
        pool.step(next(requests), second)
        if scaler is not None and second >= SETTLED_S and second % SYNC_S == 0:
            pool.pods.resize(scaler.decide(pool.measures(), pool.pods.size, second), second)
        sizes.append(pool.pods.size)
    return Run(sizes, pool.waits_s)


def prompts(load: Load, seed: int) -> Iterator[list[float]]:
    """Yield second by second how long the prompts that come take to compute."""
    rng = random.Random(seed)
    for second in _seconds():
        yield [_about(rng, PROMPT_S) for _ in range(_count(rng, load(second) / PROMPT_S))]


def outputs(load: Load, seed: int) -> Iterator[list[tuple[float, float]]]:
    """Yield second by second how long the requests that come take, and their shares of a worker's pages."""
    rng = random.Random(seed)
    for second in _seconds():
        count = _count(rng, load(second) / (OUTPUT_S * SHARE))
        yield [(_about(rng, OUTPUT_S), min(0.5, _about(rng, SHARE))) for _ in range(count)]


def _seconds() -> Iterator[int]:
    second = 0
    while True:
        yield second
        second += 1


def _about(rng: random.Random, mean: float) -> float:
    return rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)


def _count(rng: random.Random, mean: float) -> int:
    """Return how many come, if `mean` do on average (Poisson)."""
    limit, count, product = math.exp(-mean), 0, rng.random()
    while product > limit:
        count, product = count + 1, product * rng.random()
    return count
