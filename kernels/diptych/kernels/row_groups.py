"""Which rows of a step attend together: those of one request that follow each other. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """Rows of one request that follow each other, and attend together: what they see is read once for all."""

    firsts: Tensor  # int32 [num_rows]: the first row of each group
    counts: Tensor  # int32 [num_rows]: its rows; 0 behind the last group


def row_groups(row_lens: npt.NDArray[Any], most: int) -> tuple[I64, I64]:
    """Return each group's first row, and how many it has, at most `most`: `[sum of row_lens]` each, 0 at their ends.

    `row_lens`: the rows of each request, one after the other.
    """
    num_groups = -(-row_lens // most)
    owner = np.repeat(np.arange(len(row_lens)), num_groups)
    number = np.arange(len(owner)) - (np.cumsum(num_groups) - num_groups)[owner]  # of a group in its request
    firsts = (np.cumsum(row_lens) - row_lens)[owner] + number * most
    counts = np.minimum(most, row_lens[owner] - number * most)
    rest = int(row_lens.sum()) - len(owner)
    return np.pad(firsts, (0, rest)), np.pad(counts, (0, rest))
