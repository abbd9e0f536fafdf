"""How long outputs become, learned from those that ended here.

A histogram over logarithmic buckets that forgets: an output counts less with every later one. What a running request
will still make is a quantile of the outputs known to be longer than what it has made. One that has outlived all
known outputs is expected to double.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diptych.common.arrays import I64

QUANTILE: Final = 0.7  # above the median: too little means retraction, too much only a smaller batch
MEMORY: Final = 500  # outputs after which one counts a third
FIRST_GUESS: Final = 128  # tokens
MIN_EVIDENCE: Final = 2.0  # outputs
GROWTH: Final = 1.2  # from one bucket to the next

_BOUNDS: Final = np.unique(np.round(GROWTH ** np.arange(90)).astype(np.int64))  # upper, inclusive; up to 11 million


class OutputLengths:
    """Learns from `observe`; predicts with `remaining`."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_BOUNDS))

    def observe(self, num_tokens: int) -> None:
        """Learn that an output ended by itself, or at its limit, with `num_tokens`."""
        self._counts *= 1.0 - 1.0 / MEMORY
        self._counts[np.searchsorted(_BOUNDS, num_tokens)] += 1.0

    def remaining(self, made: I64, limit: I64) -> I64:
        """Return how many tokens requests will still make that have `made` some and may make `limit`; both `[n]`."""
        known = np.concatenate(([0.0], np.cumsum(self._counts)))
        shorter = known[np.searchsorted(_BOUNDS, made, side="right")]  # in buckets that hold no longer output
        evidence = known[-1] - shorter
        bucket = np.searchsorted(known[1:], shorter + QUANTILE * evidence)
        learned = _BOUNDS[bucket.clip(max=len(_BOUNDS) - 1)]
        expected = np.where(evidence < MIN_EVIDENCE, made + np.maximum(made, FIRST_GUESS), learned)
        return np.minimum(np.maximum(expected, made + 1), limit) - made
