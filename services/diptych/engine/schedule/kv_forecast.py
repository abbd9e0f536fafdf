"""Decides how many pages must stay free when a request is admitted, so that those running can finish.

Requests end one after the other, and each end frees pages for the others, so the most that is needed at once is less
than the sum: the peak is found at one of the ends (Gong et al., "Past-Future Scheduler for LLM Serving", 2025).

`OutputLengths` learns how long outputs become from those that ended here. It is a histogram over logarithmic buckets
that forgets: an output counts less with every later one. What a running request will still make is a quantile of the
outputs known to be longer than what it has made. One that has outlived all known outputs is expected to double.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from diptych.common.arrays import F64, I64
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.request import Request

SHORT: Final = 0.05  # of outputs are shorter than what is called a short one
QUANTILE: Final = 0.7  # above the median: too little means retraction, too much only a smaller batch
MEMORY: Final = 500  # outputs after which one counts a third
FIRST_GUESS: Final = 128  # tokens
MIN_EVIDENCE: Final = 2.0  # outputs
GROWTH: Final = 1.2  # from one bucket to the next

_BOUNDS: Final = np.array(sorted({round(GROWTH**n) for n in range(90)}))  # upper, inclusive; up to 11 million
_EDGES: Final = np.concatenate(([0], _BOUNDS))


class OutputLengths:
    """Learns from `observe`; predicts with `remaining`."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_BOUNDS))
        self._known = np.zeros(len(_BOUNDS) + 1)  # their sums: how many outputs were no longer than each bound

    def observe(self, num_tokens: int) -> None:
        """Learn that an output ended by itself, or at its limit, with `num_tokens`."""
        self._counts *= 1.0 - 1.0 / MEMORY
        self._counts[_BOUNDS.searchsorted(num_tokens)] += 1.0
        self._counts.cumsum(out=self._known[1:])

    @property
    def short(self) -> int:
        """How many tokens hardly an output is shorter than; 0: not known."""
        known = self._known[1:]
        bucket = int(known.searchsorted(SHORT * known[-1], side="right"))
        return int(_BOUNDS[bucket - 1]) + 1 if bucket and SHORT * known[-1] >= 1 else 0

    def ends_within(self, made: F64, num_more: F64, limit: F64) -> F64:
        """Return how likely outputs end within so many tokens more: `num_more` is `[..., n]`, the others `[n]`.

        They have `made` some, and may make `limit`. Where few are known that became longer, any number is as likely to
        be the last as it is small against what was made.
        """
        known = self._known
        shorter, by_then = (np.interp(at, _EDGES, known) for at in (made, made + num_more))
        guess = num_more / (num_more + np.maximum(made, FIRST_GUESS))
        learned = (by_then - shorter + MIN_EVIDENCE * guess) / (known[-1] - shorter + MIN_EVIDENCE)
        return np.where(made + num_more >= limit, 1.0, learned)

    def remaining(self, made: I64, limit: I64) -> I64:
        """Return how many tokens requests will still make that have `made` some and may make `limit`; both `[n]`."""
        known = self._known
        shorter = known[_BOUNDS.searchsorted(made, side="right")]  # in buckets that hold no longer output
        evidence = known[-1] - shorter
        bucket = known[1:].searchsorted(shorter + QUANTILE * evidence)
        learned = _BOUNDS.take(bucket, mode="clip")
        expected = np.where(evidence < MIN_EVIDENCE, made + np.maximum(made, FIRST_GUESS), learned)
        return np.minimum(np.maximum(expected, made + 1), limit) - made


class KvForecast:
    """Foresees the KV memory of requests by how long outputs have been. A wrong guess costs a retraction, no more."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._lengths = OutputLengths()

    def learn(self, request: Request) -> None:
        """Take note of an output that has come to its own end. Where no text is made, there is none."""
        if request.vector is None:
            self._lengths.observe(request.num_output_tokens)

    @property
    def lengths(self) -> OutputLengths:
        """How long outputs become."""
        return self._lengths

    def spare_pages(self, holders: Sequence[Request], candidate: Request) -> int:
        """Return how many pages must be left when `candidate` has got its own, beside the `holders` of pages.

        None for a request that would be alone: it gets all there is.
        """
        if not holders:
            return 0
        requests = [*holders, candidate]
        page_size = self._cache.page_size
        newly_owned = self._cache.pages_for(candidate.num_tokens) - self._cache.cached_len(candidate) // page_size
        held = [holder.num_pages - holder.cached_len // page_size for holder in holders]
        owned = np.array([*held, newly_owned], dtype=np.int64)
        made = np.array([request.num_tokens - request.prompt_len for request in requests], dtype=np.int64)
        limit = np.array([request.max_len - request.prompt_len for request in requests], dtype=np.int64)
        remaining = self._lengths.remaining(made, limit)
        hints = [request.hints.expected_tokens for request in requests]
        if any(hints):  # who said so, until it is longer
            hinted = np.array(hints, dtype=np.int64) - made
            remaining = np.where(hinted > 0, np.minimum(hinted, limit - made), remaining)
        if not self._cache.windows.num_groups:
            return peak_growth(owned, remaining, page_size)
        beside = self._beside(holders, newly_owned)
        return peak_growth(owned + beside, remaining, page_size) + self._growth(beside, remaining)

    def _beside(self, holders: Sequence[Request], newly_owned: int) -> I64:
        """Return the pages that each holder has in layers with a window, and the candidate will have."""
        held = [self._cache.num_window_pages(holder) for holder in holders]
        of_candidate = self._cache.windows.pool_pages(newly_owned, self._cache.page_size) - newly_owned
        return np.array([*held, of_candidate], dtype=np.int64)

    def _growth(self, held: I64, remaining: I64) -> int:
        """Return how many pages requests will take at most, in layers with a window, until their windows are full."""
        windows, page_size = self._cache.windows, self._cache.page_size
        missing = np.maximum(0, windows.most_live(page_size) - held)
        return int(np.minimum(missing, windows.num_groups * -(-remaining // page_size)).sum())


def peak_growth(owned: I64, remaining: I64, page_size: int) -> int:
    """Return the most further pages in use at any time, at least 0.

    `owned`: pages that each request gives back when it ends; `remaining`: tokens until then. Both `[num_requests]`.
    """
    if len(owned) == 0:
        return 0
    order = (-remaining).argsort(kind="stable")
    num_running = np.arange(1, len(owned) + 1)  # when the i-th of them, longest first, is about to end
    grown = num_running * -(-remaining[order] // page_size)
    freed = owned[order].cumsum()
    return max(0, int((grown + freed - freed[-1]).max()))
