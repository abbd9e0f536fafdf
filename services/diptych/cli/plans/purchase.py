"""Which workers to buy for a trace: predicted from its busiest time, then tried in the simulator. Pure.

A prediction knows averages and how they vary; the simulator runs the trace itself. So predictions say what to try, and
what is recommended was tried: the fewest workers that keep the goal, while one less, divided as is best, does not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diptych.common.errors import ConfigError
from diptych.planner.demand import Demand, demand
from diptych.planner.offered import Asked, offered
from diptych.planner.predict import predict
from diptych.planner.sizing import Room, Sizing
from diptych.planner.values import NO_WORKERS, Kind, Sizes
from diptych.simulator.traces.call import Call

FAMILIES: Final[Mapping[str, Callable[[int], Sizes]]] = {
    "workers that do both": lambda number: Sizes(both=number),
    "prefill and decode apart": lambda number: Sizes(number, number, 0),
    "all three together": lambda number: Sizes(number, number, number),
}


class Proposal(NamedTuple):
    """Workers that one family of divisions needs by the prediction; None: more than there may be."""

    family: str
    sizes: Sizes | None


def busiest(calls: Sequence[Call], cached_lens: Sequence[int], sizing: Sizing, window_s: float) -> tuple[Kind, ...]:
    """Return the load of the window that has most work, of those that begin half a window after each other, as kinds.

    Raises `ConfigError` where nobody can say how many calls come a second.
    """
    asked = [
        Asked(call.arrival_s, call.prompt_len, cached, call.output_len, is_over=True)
        for call, cached in zip(calls, cached_lens, strict=True)
    ]
    arrivals = [call.arrival_s for call in calls]
    end_s, began_s = arrivals[-1], arrivals[0] - 1e-6
    if arrivals[0] == end_s:
        raise ConfigError("the calls of the trace all come at once: give one in which they come one after the other")
    number = 1 + max(0, math.ceil(2 * (end_s - began_s - window_s) / window_s))
    ends = [max(end_s - each * window_s / 2, min(began_s + window_s, end_s)) for each in range(number)]
    windows = [(each, asked[bisect_right(arrivals, each - window_s) : bisect_right(arrivals, each)]) for each in ends]
    found = [offered(there, each, [window_s], began_s)[0].kinds or () for each, there in windows]
    return max(found, key=lambda kinds: demand(kinds, sizing.capacity).work)


def cached_at_best(calls: Sequence[Call]) -> list[int]:
    """Return the tokens of each prompt that a cache without limits would hold, one token less than all."""
    seen: set[int] = set()
    found = []
    for call in calls:
        names = call.blocks.tolist()
        number = next((place for place, name in enumerate(names) if name not in seen), len(names))
        found.append(min(call.prompt_len - 1, number * 512))
        seen.update(names)
    return found


def proposals(load: Demand, sizing: Sizing, most: int) -> list[Proposal]:
    """Return what each family needs by the prediction."""
    return [
        Proposal(family, sizing.smallest(load, Room(NO_WORKERS, limit(most), most)))
        for family, limit in FAMILIES.items()
    ]


@dataclass(slots=True)
class Search:
    """Looks for the fewest workers that keep a goal when they are tried, with so many trials at most."""

    load: Demand
    sizing: Sizing
    most: int
    try_out: Callable[[Sizes], float]  # the share of the calls that keep the goal
    num_trials: int
    tried: dict[Sizes, float] = field(default_factory=dict)

    def fewest(self) -> Sizes | None:
        """Return the fewest that were found to keep the goal; None: nothing that was tried does."""
        predicted = [each.sizes.total for each in proposals(self.load, self.sizing, self.most) if each.sizes]
        number = min(predicted, default=self.most)
        found = self._of(number)
        while found is None and number < self.most and self._may_try:
            number += 1
            found = self._of(number)
        while found is not None and found.total == number and number > 1 and self._may_try:
            number -= 1
            found = self._of(number) or found
        kept = [sizes for sizes, share in self.tried.items() if share >= self.sizing.goal.share]
        return min(kept, key=lambda each: each.total, default=None)

    @property
    def _may_try(self) -> bool:
        return len(self.tried) < self.num_trials

    def _of(self, number: int) -> Sizes | None:
        """Return a division of so many workers that keeps the goal, the most promising of each family tried first."""
        known = [each for each, kept in self.tried.items() if each.total == number and kept >= self.sizing.goal.share]
        if known:
            return known[0]
        for sizes in self._candidates(number):
            if sizes in self.tried:
                continue
            if not self._may_try:
                return None
            self.tried[sizes] = self.try_out(sizes)
            if self.tried[sizes] >= self.sizing.goal.share:
                return sizes
        return None

    def _candidates(self, number: int) -> Iterator[Sizes]:
        rooms = [Room(NO_WORKERS, limit(number), number) for limit in FAMILIES.values()]
        best = {self.sizing.best(self.load, room) for room in rooms}
        kept = {each: predict(self.sizing.capacity, each, self.load, self.sizing.goal).kept for each in best}
        held = {each: self.sizing.held(each, self.load) for each in best}
        ranked = sorted(best, key=lambda each: (-held[each], -kept[each], each))
        yield from (each for each in ranked if each.total == number and each.serves)
