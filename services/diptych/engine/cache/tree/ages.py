"""How long pages were unused when they were evicted, and what a page more would have brought. Pure.

The worth of memory at the margin is read from the pages that are found again just before they would have been evicted:
those that were unused for longer than half as long as pages are when they go. They lie in the half of the cache that
is the next to go, so what that half brings a second, by its pages, is what a page more or less would (Mattson et al.,
"Evaluation techniques for storage hierarchies", 1970: the slope of the curve of hits over size at the present size).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final

import numpy as np

from diptych.engine.cache.return_times import EDGES_S

MEMORY_S: Final = 120.0  # after which what was seen counts a third
_BOUNDS_S: Final = (*EDGES_S, math.inf)


class EvictionAges:
    """Counts pages of the pool that go, and those that are found late. Forgets, by the time that it is told."""

    def __init__(self) -> None:
        self.num_evicted = 0  # pages, since start
        self._evicted = np.zeros(len(_BOUNDS_S))  # by age, of late
        self._found_late = 0.0  # pages, of late
        self._at_s = 0.0
        self._median_s = math.inf

    def pass_time(self, now_s: float) -> None:
        """Forget some of what was seen. Cheap where little time has passed."""
        if now_s - self._at_s < MEMORY_S / 16:
            return
        kept = math.exp((self._at_s - now_s) / MEMORY_S)
        self._evicted *= kept
        self._found_late *= kept
        self._at_s = now_s
        self._median_s = self.quantile_s(0.5)

    def evicted(self, age_s: float, num_pages: int) -> None:
        """So many pages leave the pool that were not used for so long."""
        self.num_evicted += num_pages
        self._evicted[bisect_left(EDGES_S, age_s)] += num_pages

    def found(self, age_s: float, num_pages: int) -> None:
        """So many pages are found that were not used for so long."""
        if age_s > self._median_s / 2:
            self._found_late += num_pages

    def quantile_s(self, share: float) -> float:
        """Return the age within which such a share of the pages goes; infinite: none goes."""
        known = np.cumsum(self._evicted)
        if known[-1] < 1.0:
            return math.inf
        return _BOUNDS_S[int(np.searchsorted(known, share * known[-1]))]

    def price(self, num_pages: int) -> float:
        """Return what a page of `num_pages` that may go brings a second, in pages that need not be made; 0: nothing.

        So it is where nothing is evicted.
        """
        if self._median_s == math.inf or not num_pages:
            return 0.0
        return self._found_late / MEMORY_S / (num_pages / 2)
