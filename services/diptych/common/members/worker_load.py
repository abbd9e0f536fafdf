"""Computes the measures of a worker's load that pools are scaled by. Pure."""

from __future__ import annotations

from diptych.v1.bootstrap_pb2 import WorkerLoad


def computable_tokens(load: WorkerLoad) -> int:
    """Return the prompt tokens that wait to be computed and can be.

    Not those whose decode worker has no pages for them yet: more prefill workers would not help them.
    """
    return max(0, load.waiting_tokens - load.blocked_tokens)


def kv_occupancy(load: WorkerLoad) -> float:
    """Return the share of KV pages that are neither free nor evictable; 0 where there is no pool yet."""
    return 1 - load.free_pages / load.total_pages if load.total_pages else 0.0


def kv_demand(load: WorkerLoad) -> float:
    """Return the same with what those without pages will need, if they are like the others: 1.5 is a half too much.

    Occupancy ends at 1, however many wait: a pool that is scaled by it follows a burst step by step, each as long as a
    start.
    """
    num_granted = load.num_running + load.num_waiting - load.num_ungranted
    return kv_occupancy(load) * (1 + load.num_ungranted / max(1, num_granted))
