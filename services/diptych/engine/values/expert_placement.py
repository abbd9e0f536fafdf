"""On which rank each expert is, and how that follows from what was counted of their work.

An expert may be on several ranks (a redundant expert): tokens take turns among its copies. `balanced` is the greedy
rule of DeepSeek's EPLB (github.com/deepseek-ai/EPLB): copies go one after the other to the expert with the most work
for each copy, and then, heaviest first, to the rank with the least work that has room.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Experts of one layer, by rank. Each is somewhere, and on no rank twice."""

    of_ranks: tuple[tuple[int, ...], ...]

    @property
    def num_experts(self) -> int:
        return 1 + max(max(own, default=-1) for own in self.of_ranks)

    def copies(self) -> list[list[tuple[int, int]]]:
        """Return where each expert is: ranks, and its places among those of the rank."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, own in enumerate(self.of_ranks):
            for place, expert in enumerate(own):
                found[expert].append((rank, place))
        return found

    def work(self, load: Sequence[float]) -> list[float]:
        """Return the work of each rank, if experts have the work `load` and copies of one share it."""
        num_copies = [len(where) for where in self.copies()]
        return [sum(load[expert] / num_copies[expert] for expert in own) for own in self.of_ranks]


def in_order(num_experts: int, num_ranks: int) -> ExpertPlacement:
    """Return neighbours on each rank, each expert once; ranks have as many as others, or one more or less."""
    ends = [rank * num_experts // num_ranks for rank in range(num_ranks + 1)]
    return ExpertPlacement(tuple(tuple(range(*pair)) for pair in itertools.pairwise(ends)))


def balanced(load: Sequence[float], num_ranks: int, num_redundant: int = 0) -> ExpertPlacement:
    """Return a placement by the work of each expert; the heaviest rank of it is never heavier than `in_order`'s.

    `num_redundant`: copies beside one of each expert, divided as evenly among ranks as all are.
    """
    num_experts = len(load)
    num_copies = _num_copies(load, num_ranks, num_redundant)
    room = [len(own) for own in in_order(num_experts + num_redundant, num_ranks).of_ranks]
    placed = _placed(load, num_copies, room)
    plain = in_order(num_experts, num_ranks)
    if placed is None or max(placed.work(load)) > max(plain.work(load)):
        return plain
    return placed


def _num_copies(load: Sequence[float], num_ranks: int, num_redundant: int) -> list[int]:
    copies = [1] * len(load)
    for _ in range(num_redundant):
        candidates = [expert for expert in range(len(load)) if copies[expert] < num_ranks]
        copies[max(candidates, key=lambda expert: (load[expert] / copies[expert], -expert))] += 1
    return copies


def _placed(load: Sequence[float], num_copies: Sequence[int], room: Sequence[int]) -> ExpertPlacement | None:
    """Place the heaviest copies first; None where what is left of the room is on ranks that have the expert."""
    shares = [load[expert] / copies for expert, copies in enumerate(num_copies)]
    order = sorted(range(len(load)), key=lambda expert: (-shares[expert], -num_copies[expert], expert))
    work, of_ranks = [0.0] * len(room), [set[int]() for _ in room]
    for expert in order:
        for _ in range(num_copies[expert]):
            open_ranks = [r for r, own in enumerate(of_ranks) if len(own) < room[r] and expert not in own]
            if not open_ranks:
                return None
            rank = min(open_ranks, key=lambda r: (work[r], r))
            of_ranks[rank].add(expert)
            work[rank] += shares[expert]
    return ExpertPlacement(tuple(tuple(sorted(own)) for own in of_ranks))
