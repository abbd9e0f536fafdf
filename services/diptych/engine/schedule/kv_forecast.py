"""Decides how many pages must stay free when a request is admitted, so that those running can finish.

Requests end one after the other, and each end frees pages for the others, so the most that is needed at once is less
than the sum: the peak is found at one of the ends (Gong et al., "Past-Future Scheduler for LLM Serving", 2025).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.output_lengths import OutputLengths
from diptych.engine.values.request import Request


class KvForecast:
    """Foresees the KV memory of requests by how long outputs have been. A wrong guess costs a retraction, no more."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._lengths = OutputLengths()

    def learn(self, request: Request) -> None:
        """Take note of an output that has come to its own end."""
        self._lengths.observe(request.num_output_tokens)

    def spare_pages(self, holders: Sequence[Request], candidate: Request) -> int:
        """Return how many pages must be left when `candidate` has got its own, beside the `holders` of pages.

        None for a request that would be alone: it gets all there is.
        """
        if not holders:
            return 0
        requests = [*holders, candidate]
        page_size = self._cache.page_size
        owned = np.array([holder.num_pages - holder.cached_len // page_size for holder in holders], dtype=np.int64)
        newly_owned = self._cache.pages_for(candidate.num_tokens) - self._cache.cached_len(candidate) // page_size
        made = np.array([request.num_output_tokens for request in requests], dtype=np.int64)
        limit = np.array([request.max_len - request.prompt_len for request in requests], dtype=np.int64)
        return peak_growth(np.append(owned, newly_owned), self._lengths.remaining(made, limit), page_size)


def peak_growth(owned: I64, remaining: I64, page_size: int) -> int:
    """Return the most further pages in use at any time, at least 0.

    `owned`: pages that each request gives back when it ends; `remaining`: tokens until then. Both `[num_requests]`.
    """
    if len(owned) == 0:
        return 0
    order = np.argsort(-remaining, kind="stable")
    num_running = np.arange(1, len(owned) + 1)  # when the i-th of them, longest first, is about to end
    grown = num_running * -(-remaining[order] // page_size)
    freed = owned.sum() - np.cumsum(owned[order])
    return max(0, int((grown - freed).max()))
