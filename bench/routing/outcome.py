"""What a replay came to: cache hits, how evenly the work fell, latencies, and goodput."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routing.block_cache import BlockCache
from routing.engine import Job
from routing.trace import TracedRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """Arrays have one value a request, in the order of arrival."""

    hit_rate: float  # blocks found cached, of all
    found_rate: float  # blocks that some worker had when a request came, from where they can be pulled
    cv_requests: float  # over the prefill workers: standard deviation by mean
    cv_missed: float  # likewise of the blocks that they computed
    makespan_s: float
    arrival_s: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    total_s: NDArray[np.float64]

    def ttft_percentiles(self) -> tuple[float, float, float]:
        """Return p50, p90 and p99."""
        p50, p90, p99 = np.percentile(self.ttft_s, (50, 90, 99)).tolist()
        return p50, p90, p99

    def goodput(self, ttft_s: float, tpot_s: float) -> float:
        """Return the share of requests that meet both."""
        return float(np.mean((self.ttft_s <= ttft_s) & (self.tpot_s <= tpot_s)))


def outcome(jobs: Sequence[Job], prefill_ids: Iterable[int]) -> Outcome:
    ids = tuple(prefill_ids)
    missed = dict.fromkeys(ids, 0)
    requests = dict.fromkeys(ids, 0)
    for job in jobs:
        missed[job.pair.prefill_id] += job.request.num_blocks - job.cached_blocks
        requests[job.pair.prefill_id] += 1
    num_blocks = sum(job.request.num_blocks for job in jobs)
    arrival = np.array([job.arrival_s for job in jobs])
    first = np.array([job.first_token_s for job in jobs])
    finished = np.array([job.finished_s for job in jobs])
    gaps = np.array([max(1, job.request.output_len - 1) for job in jobs])
    return Outcome(
        1 - sum(missed.values()) / num_blocks,
        sum(max(job.held_blocks, job.cached_blocks) for job in jobs) / num_blocks,
        _variation(requests.values()),
        _variation(missed.values()),
        float(finished.max()),
        arrival,
        first - arrival,
        (finished - first) / gaps,
        finished - arrival,
    )


def pooled_hit_rate(requests: Sequence[TracedRequest], num_blocks: int) -> float:
    """Return the hit rate of one cache with all blocks: no placement of requests on parts of it does better."""
    cache, hits = BlockCache(num_blocks), 0
    for request in requests:
        hits += cache.cached(request.block_list)
        cache.put(request.block_list)
    return hits / sum(request.num_blocks for request in requests)


def _variation(values: Iterable[int]) -> float:
    array = np.array(tuple(values), float)
    return float(array.std() / array.mean()) if array.any() else 0.0
