"""The random numbers of sampling: one for each (seed, position), the same in every process, for all time."""

from __future__ import annotations

import numpy as np

from diptych.common.arrays import I64, U64


def uniforms(seeds: U64, positions: I64) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return one number in [0, 1) for each (seed, position)."""
    mixed = _splitmix64(_splitmix64(seeds) ^ positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: U64) -> U64:
    """The finaliser of Steele, Lea and Flood's SplitMix64 (2014): every input bit reaches every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
