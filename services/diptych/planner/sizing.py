"""Finds the fewest workers that keep a goal, and what they keep where there are not enough. Pure.

More workers never serve worse, so the number is found by bisection. For each number the roles are tried: all of them
for a few workers; for many, those near the proportion of the work, and with some that do both for what is left over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from diptych.planner.demand import Demand
from diptych.planner.predict import SPARE, Prediction, predict
from diptych.planner.values import Capacity, Goal, Sizes

MAX_HELD: Final = 4.0  # times the load: more than that is enough to know
_FEW: Final = 5  # workers of which all divisions are tried
_NEAR: Final = (0, 1, -1, 2, -2)
_PRECISION: Final = 7  # halvings of a share


@dataclass(frozen=True, slots=True)
class Room:
    """What may be chosen among."""

    least: Sizes
    most: Sizes
    max_total: int

    @property
    def highest(self) -> int:
        """Return how many workers there may be, by roles and in all."""
        return min(self.max_total, self.most.total)

    def __contains__(self, sizes: Sizes) -> bool:
        within = all(low <= each <= high for low, each, high in zip(self.least, sizes, self.most, strict=True))
        return within and sizes.total <= self.max_total


@dataclass(frozen=True, slots=True)
class Sizing:
    """One model of workers and one goal."""

    capacity: Capacity
    goal: Goal

    def kept(self, sizes: Sizes, demand: Demand) -> float:
        return predict(self.capacity, sizes, demand, self.goal).kept

    def holds(self, sizes: Sizes, demand: Demand) -> bool:
        return self._is_enough(predict(self.capacity, sizes, demand, self.goal))

    def _is_enough(self, found: Prediction) -> bool:
        """Whether the goal is kept, and nobody waits for ever: not even those of whom a goal expects nothing."""
        return found.kept >= self.goal.share and found.is_steady

    def held(self, sizes: Sizes, demand: Demand) -> float:
        """Return how many times the load so many workers hold, 0 to `MAX_HELD`."""

        def can(factor: float) -> bool:
            return self.holds(sizes, demand.times(factor))

        return _largest(can, 1.0, MAX_HELD) if can(1.0) else _largest(can, 0.0, 1.0)

    def borne(self, sizes: Sizes, demand: Demand) -> float:
        """Return with how many times the load nobody waits for ever, 0 to `MAX_HELD`, be the goal kept or not."""

        def can(factor: float) -> bool:
            return predict(self.capacity, sizes, demand.times(factor), self.goal).is_steady

        return _largest(can, 0.0, MAX_HELD)

    def smallest(self, demand: Demand, room: Room, near: Sizes | None = None) -> Sizes | None:
        """Return the fewest workers that hold the load, divided as near to `near` as can be; None: there are not."""
        low, high = room.least.total - 1, room.highest
        found = self._of(high, demand, room, near)
        if found is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            better = self._of(middle, demand, room, near)
            if better is None:
                low = middle
            else:
                high, found = middle, better
        return found

    def best(self, demand: Demand, room: Room) -> Sizes:
        """Return the division of as many workers as there may be that holds the largest part of the load."""
        found = room.least

        def can(factor: float) -> bool:
            nonlocal found
            better = self._of(room.highest, demand.times(factor), room, None)
            found = better or found
            return better is not None

        _largest(can, 0.0, 1.0)
        return found

    def _of(self, total: int, demand: Demand, room: Room, near: Sizes | None) -> Sizes | None:
        """Return a division of so many workers that holds the load, None if there is none."""
        divisions = self._divisions(total, demand, room)
        tried = ((each, predict(self.capacity, each, demand, self.goal)) for each in divisions)
        holding = [(each, found.kept) for each, found in tried if self._is_enough(found)]
        if not holding:
            return None
        return min(holding, key=lambda found: (*_change(found[0], near), -round(found[1], 3)))[0]

    def _divisions(self, total: int, demand: Demand, room: Room) -> Iterator[Sizes]:
        """Yield the divisions of so many workers that are worth a try, each once."""
        tried = _all(total) if total <= _FEW else _likely(total, self._prefill_part(demand), room)
        yield from (each for each in dict.fromkeys(tried) if each.serves and each in room)

    def _prefill_part(self, demand: Demand) -> float:
        """Return the share of the work that is prompts'."""
        prompts = demand.requests_per_s * demand.work_s + demand.backlog
        rows = demand.output_tokens_per_s * _token_s(self.capacity, demand, self.goal)
        return prompts / (prompts + rows) if prompts + rows else 0.5


def _change(sizes: Sizes, near: Sizes | None) -> tuple[int, int]:
    """Return how many workers differ, and how many have a role that nobody has yet, who find nothing cached."""
    if near is None:
        return 0, 0
    return distance(sizes, near), sum(each for each, other in zip(sizes, near, strict=True) if not other)


def distance(sizes: Sizes, other: Sizes) -> int:
    """Return how many workers differ."""
    return sum(abs(each - another) for each, another in zip(sizes, other, strict=True))


def _token_s(capacity: Capacity, demand: Demand, goal: Goal) -> float:
    """Return the worker's time that a token of output costs where as many rows share a step as may."""
    step_s, row_s = capacity.step_model.step, demand.row_s
    by_pages = capacity.kv_tokens / demand.context if demand.context else math.inf
    by_time = (goal.tpot_s * SPARE - step_s) / row_s if goal.tpot_s and row_s else math.inf
    return row_s + step_s / max(1.0, min(by_pages, by_time, capacity.max_requests))


def _all(total: int) -> Iterator[Sizes]:
    for both in range(total + 1):
        for prefill in range(total - both + 1):
            yield Sizes(prefill, total - both - prefill, both)


def _likely(total: int, prefill_part: float, room: Room) -> Iterator[Sizes]:
    for both in (total, 0, 1, 2, total // 2, total - room.least.prefill - room.least.decode, room.least.both):
        rest = total - both
        middle = round(rest * prefill_part)
        for prefill in (*(middle + each for each in _NEAR), room.least.prefill, rest - room.least.decode):
            if 0 <= prefill <= rest:
                yield Sizes(prefill, rest - prefill, both)


def _largest(can: Callable[[float], bool], low: float, high: float) -> float:
    """Return the largest factor between two with which it can be done, to a 128th of their difference; else `low`."""
    if can(high):
        return high
    for _ in range(_PRECISION):
        middle = (low + high) / 2
        low, high = (middle, high) if can(middle) else (low, middle)
    return low
