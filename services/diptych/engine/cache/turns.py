"""How likely it is that a conversation goes on, and how soon: learned of the prompts that are computed here. Pure.

A prompt that goes on behind the end of an earlier one is that one's next turn. The ends of prompts are remembered by
the names of their pages for longer than their text is cached, so a conversation that was evicted and computed again is
known for what it is. Of each *kind* of prompt, by its turn and by how much of it was new, the times are counted after
which the next one came. Time is memory: pages that have come to the pool since.

What a text that has waited for so long may yet bring is the most returns for the time that it is kept for them, of all
times that it may be kept for (Gittins, "Bandit processes and dynamic allocation indices", 1979; caches order what they
keep by this as the density of its hits: Beckmann et al., "LHD", NSDI 2018).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from diptych.common.arrays import F64, I64

MAX_TURNS: Final = 2  # that are told apart: the first, and all others
MAX_ENDS: Final = 4096  # that are remembered
MEMORY: Final = 4096  # prompts after which what was counted counts a half
NEW_TOKENS: Final = 512  # no more of them are told apart
LEARNED: Final = 64  # prompts: so often tables are made anew, from the first so many on
PRIOR: Final = 20.0  # prompts of all kinds that count as of each
NUM_AGES: Final = 96  # quarter octaves of pages
SMOOTH: Final = np.array([1, 2, 3, 2, 1]) / 9  # over neighbouring ages
_EDGES: Final = 2.0 ** (np.arange(NUM_AGES + 1) / 4)
_EDGES[0] = 0.0
_WIDTHS: Final = np.diff(_EDGES)

Kind = tuple[int, int]  # (turn, magnitude of what was new)
UNKNOWN: Final[Kind] = (0, 0)


@dataclass(slots=True)
class _End:
    """Where a prompt ended."""

    turn: int  # 0: texts part here, so it is the beginning of several conversations
    kind: Kind
    at: int  # pages that had come until then
    onward: int = 0  # the name of the page with which it goes on; 0: it has not
    is_awaited: bool = True


def age_of(num_pages: int) -> int:
    """Return the interval in which so many pages are."""
    return min(NUM_AGES - 1, (num_pages**4).bit_length() - 1) if num_pages > 0 else 0


def ages_of(nums_pages: Sequence[int]) -> I64:
    """Return `age_of` each, many times faster."""
    return np.minimum(np.searchsorted(_EDGES, nums_pages, "right") - 1, NUM_AGES - 1)


class Turns:
    """Remembers where prompts have ended, and counts what became of them."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._ends: OrderedDict[int, _End] = OrderedDict()  # by the name of the last whole page, used last at the end
        self._returns: dict[Kind, F64] = {}  # by age
        self._losses: dict[Kind, F64] = {}  # likewise: of which it is not known any more whether they go on
        self._num_noted = 0
        self._indices: dict[Kind, list[float]] = {}

    @property
    def is_known(self) -> bool:
        """Whether enough was seen to tell anything."""
        return bool(self._indices)

    def note(self, names: Sequence[int], now: int) -> Kind:
        """A prompt of whole pages with these names is computed, and so many pages have come; return its kind."""
        if not names:
            return UNKNOWN
        found = [place for place, name in enumerate(names) if name in self._ends]
        turn = 1
        for place in found:
            turn = self._pass(names, place) + 1
        if found:
            self._came_back(self._ends[names[found[-1]]], now)
        num_new = (len(names) - 1 - (found[-1] if found else -1)) * self._page_size
        kind = min(turn, MAX_TURNS), (num_new // NEW_TOKENS).bit_length()
        self._remember(names[-1], _End(turn, kind, now), now)
        return kind

    def index(self, kind: Kind, num_pages: int) -> float:
        """Return how many returns a page's time may bring of a text that has waited for so many."""
        return self._indices.get(kind, self._indices[UNKNOWN])[age_of(num_pages)]

    def _pass(self, names: Sequence[int], place: int) -> int:
        """A prompt has an end of an earlier one in it: return which turn that was."""
        self._ends.move_to_end(names[place])
        end = self._ends[names[place]]
        if place + 1 < len(names):
            end.turn = end.turn if end.onward in (0, names[place + 1]) else 0
            end.onward = names[place + 1]
        return end.turn

    def _came_back(self, end: _End, now: int) -> None:
        if end.is_awaited:
            end.is_awaited = False
            _counts(self._returns, end.kind)[age_of(now - end.at)] += 1

    def _remember(self, name: int, end: _End, now: int) -> None:
        known = self._ends.get(name)
        if known is not None:  # the same prompt again
            end.turn, end.onward = known.turn, known.onward
        self._ends[name] = end
        self._ends.move_to_end(name)
        if len(self._ends) > MAX_ENDS:
            _, gone = self._ends.popitem(last=False)
            if gone.is_awaited:
                _counts(self._losses, gone.kind)[age_of(now - gone.at)] += 1
        self._num_noted += 1
        if self._num_noted % MEMORY == 0:
            for counts in (*self._returns.values(), *self._losses.values()):
                counts /= 2
        if self._num_noted % LEARNED == 0:
            self._learn(now)

    def _not_returned(self, now: int) -> dict[Kind, F64]:
        """Return how many have not gone on, by the age at which that was last known."""
        left = {kind: counts.copy() for kind, counts in self._losses.items()}
        waiting: dict[Kind, list[int]] = {}
        for end in self._ends.values():
            if end.is_awaited:
                waiting.setdefault(end.kind, []).append(now - end.at)
        for kind, waits in waiting.items():
            _counts(left, kind)[:] += np.bincount(ages_of(waits), minlength=NUM_AGES)
        return left

    def _learn(self, now: int) -> None:
        """Make the tables of indices anew."""
        left = self._not_returned(now)
        kinds = [*{**self._returns, **left}]
        returned = np.array([_counts(self._returns, kind) for kind in kinds])
        others = np.array([_counts(left, kind) for kind in kinds])
        at_risk = (returned + others)[:, ::-1].cumsum(axis=1)[:, ::-1] - others  # of those: had waited for so long
        overall = returned.sum(axis=0) / np.maximum(at_risk.sum(axis=0), 1.0)
        hazards = (returned + PRIOR * overall) / (at_risk + PRIOR)
        self._indices = dict(zip(kinds, map(_indices, hazards), strict=True)) | {UNKNOWN: _indices(overall)}


def _counts(counts: dict[Kind, F64], kind: Kind) -> F64:
    return counts.setdefault(kind, np.zeros(NUM_AGES))


def _indices(hazards: F64) -> list[float]:
    """Return by age the most returns for a page's time. `hazards`: which share of those left returns, by age."""
    hazards = np.convolve(hazards, SMOOTH, "same")
    left = np.concatenate([[1.0], np.cumprod(1.0 - hazards)])
    returned = 1.0 - left
    kept = np.concatenate([[0.0], np.cumsum(left[:-1] * _WIDTHS * (1.0 - hazards / 2))])
    num_returned = returned[None, 1:] - returned[:-1, None]  # from an age on [rows], until another one is over
    num_kept = kept[None, 1:] - kept[:-1, None]
    later = np.triu(np.ones((NUM_AGES, NUM_AGES), bool)) & (num_kept > 0)
    rates = np.where(later, num_returned / np.where(later, num_kept, 1.0), 0.0)
    return list(map(float, rates.max(axis=1)))
