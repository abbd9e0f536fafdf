"""Which cached texts a worker that leaves gives away, in which order, and to whom. Pure.

Time is short, and pages are what it goes for. So those texts come first that bring most for a page: how often they were
used, how lately, and what it takes to compute them where they stand. A text comes with all that is before it, which its
taker mostly has by then, or is given with the first text that needs it.

Texts go to peers by rendezvous hashing of their names (Thaler and Ravishankar, "A name-based mapping scheme for
rendezvous", 1996): evenly, and where a peer has no room, to the next one of the text's own order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple

HALF_LIFE_S: Final = 300.0  # since the last use: half as likely to be wanted again
MAX_TEXTS: Final = 2048  # that are considered: those that bring most
_MIX, _MASK = 0x9E37_79B9_7F4A_7C15, 2**64 - 1

Seconds = Callable[[int, int], float]  # behind so many pages of a prompt, to compute so many more


class Run(NamedTuple):
    """A piece of cached text behind which texts part, or end."""

    parent: int  # the place, in the list of all, of the run before it; -1: it begins a text
    first_page: int  # of the text
    num_pages: int
    num_uses: int  # requests that made or reused it
    idle_s: float  # since the last of them


def giving_order(runs: Sequence[Run], compute_s: Seconds) -> list[int]:
    """Return the places of runs with which texts end that are to be offered, in this order.

    A run is passed over that is brought as well by one behind it: by whatever is worth half as much.
    """
    worths = [_worth_of_page(run, compute_s) for run in runs]
    best_behind = [-1.0] * len(runs)
    for run, worth in zip(runs, worths, strict=True):
        if run.parent >= 0:
            best_behind[run.parent] = max(best_behind[run.parent], worth)
    ends = (place for place, worth in enumerate(worths) if best_behind[place] < worth / 2)
    return heapq.nlargest(MAX_TEXTS, ends, key=lambda place: (worths[place], -place))


def _worth_of_page(run: Run, compute_s: Seconds) -> float:
    """Return the seconds that a page is likely to save; pages alone are counted where no time is known."""
    seconds = compute_s(run.first_page, run.num_pages)
    of_page = seconds / run.num_pages if 0 < seconds < math.inf else 1.0
    return max(1, run.num_uses) * math.exp2(-run.idle_s / HALF_LIFE_S) * of_page


def takers(name: int, peers: Iterable[int], tried: Collection[int] = ()) -> list[int]:
    """Return to whom a text of that name goes: the first of these, or whoever is next if he does not take it."""
    return sorted((peer for peer in peers if peer not in tried), key=lambda peer: _mixed(name ^ _mixed(peer)))


def _mixed(number: int) -> int:
    """Return a number any bit of which may depend on any bit of this one (splitmix64)."""
    number = (number + _MIX) & _MASK
    number = (number ^ number >> 30) * 0xBF58_476D_1CE4_E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D0_49BB_1331_11EB & _MASK
    return number ^ number >> 31
