"""What was asked for over windows, out of the requests themselves: those that run counted like those that are over.

Requests count in the window in which they came. Of an output that still grows it is taken that it becomes as long as
the outputs that are over and were longer than it is now, in the mean; without any, twice as long as it is.
Requests are put together by their lengths, a kind for each factor of four: means over all would hide that most prompts
are short and some are long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from diptych.planner.values import Kind, Offered

MOST_KINDS: Final = 12
F64 = npt.NDArray[np.float64]


class Asked(NamedTuple):
    """One request."""

    arrival_s: float
    prompt_len: int
    cached_len: int
    output_len: int  # tokens so far
    is_over: bool


def offered(
    asked: Iterable[Asked], now_s: float, windows_s: Sequence[float], began_s: float = -math.inf
) -> tuple[Offered, ...]:
    """Return what was asked for over each window, none longer than since `began_s`, when requests were first counted.

    A request that came before all of them tells of outputs only.
    """
    table = np.array(list(asked), np.float64).reshape(-1, len(Asked._fields))
    arrivals, lens = table[:, 0], table[:, 1:4]
    lens[:, 2] = _expected(lens[:, 2], table[:, 4] > 0)
    windows = [each for each in sorted({min(each, now_s - began_s) for each in windows_s}) if each > 0]
    recent = [lens[(arrivals > now_s - each) & (arrivals <= now_s)] for each in windows]
    return tuple(Offered(each, _kinds(there, each)) for each, there in zip(windows, recent, strict=True))


def _expected(output_lens: F64, is_over: npt.NDArray[np.bool_]) -> F64:
    """Return how long outputs become that have so many tokens now."""
    whole = np.sort(output_lens[is_over])
    sums = np.concatenate([[0.0], np.cumsum(whole)])
    first = np.searchsorted(whole, output_lens, side="right")
    longer = len(whole) - first
    means = (sums[-1] - sums[first]) / np.maximum(1, longer)
    grown: F64 = np.where(longer > 0, means, np.maximum(1.0, 2.0 * output_lens))
    return np.where(is_over, output_lens, grown)


def _kinds(lens: F64, window_s: float) -> tuple[Kind, ...]:
    """Return the kinds of requests with such prompts, cached parts and outputs."""
    new, out = np.maximum(1.0, lens[:, 0] - lens[:, 1]), np.maximum(1.0, lens[:, 2])
    names = np.floor(np.log2(new) / 2) * 64 + np.floor(np.log2(out) / 2)
    _, which = np.unique(names, return_inverse=True)
    sums = [
        (int((which == each).sum()), *lens[which == each].sum(axis=0).tolist())
        for each in range(int(which.max(initial=-1)) + 1)
    ]
    while len(sums) > MOST_KINDS:
        first, second, *others = sorted(sums)  # the rarest
        sums = [tuple(map(sum, zip(first, second, strict=True))), *others]
    return tuple(Kind(number / window_s, *(each / number for each in totals)) for number, *totals in sums)
