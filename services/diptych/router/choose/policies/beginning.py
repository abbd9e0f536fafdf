"""How a prompt begins at a worker: with what is in its pool, what it loads from tiers, or what it pulls. Pure.

As workers decide it (`engine.cache.worth_loading`, `unified.pulling`), by what they measured: tier behind tier, as
long as loading is sooner than computing; and from one other worker what no level here has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from diptych.router.choose.policies.policy import Worker

PULL_S: Final = 0.01  # of a pull beside its bytes: a holder answers between two of its steps

ComputeSeconds = Callable[[float, float], float]  # (tokens, those before them) -> what computing them takes


def beginning(worker: Worker, prompt_len: int, compute_s: ComputeSeconds) -> tuple[float, float]:
    """Return how long the worker waits for cached tokens, and how long it then computes: the least in all."""
    cached = worker.cached_tokens
    if worker.held is None and not worker.loads:
        return 0.0, compute_s(max(1, prompt_len - cached), cached)
    ways = [(wait_s, compute_s(max(1, prompt_len - end), end)) for wait_s, end in _ways(worker)]
    return min(ways, key=sum)


def computed_s(worker: Worker, prompt_len: int) -> float:
    """Return how long a prompt takes there, once its turn has come."""
    return sum(beginning(worker, prompt_len, worker.learned.prefill.at))


def restored_s(worker: Worker) -> float:
    """Return how long a worker loads what it has of a prompt in tiers."""
    return sum([each.load_s for each in worker.loads]) if worker.loads else 0.0


def _ways(worker: Worker) -> Iterator[tuple[float, int]]:
    """Yield how long it takes until how many leading tokens are in the pool."""
    wait_s, held = 0.0, worker.held
    yield wait_s, worker.pool_tokens
    for load in worker.loads:
        wait_s += load.load_s
        yield wait_s, load.end
    if held is not None:
        num_bytes = (held.num_tokens - worker.cached_tokens) * worker.token_bytes
        yield wait_s + PULL_S + num_bytes / held.bytes_per_s, held.num_tokens
