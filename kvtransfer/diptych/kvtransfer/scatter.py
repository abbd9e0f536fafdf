"""The pages of a pool as scattered pieces: what benchmarks of page writes move."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scatter:
    """Pieces in random order on both sides; every page of a pool is in one."""

    piece_nbytes: int
    src: Pages  # a piece is a run of neighbours
    dst: Pages


def scatter(num_pages: int, page_nbytes: int, piece_nbytes: int) -> Scatter:
    """Cut `num_pages` pages into pieces; what is left of them is in none. The same each time."""
    random = np.random.default_rng(piece_nbytes)
    run = np.arange(piece_nbytes // page_nbytes)
    num_pieces = num_pages // len(run)
    src, dst = ((random.permutation(num_pieces)[:, None] * len(run) + run).reshape(-1) for _ in range(2))
    return Scatter(piece_nbytes, src, dst)
