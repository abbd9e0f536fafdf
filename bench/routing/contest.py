"""A member of the family under `pair_cost` and under every other policy; unified workers also as one, and as two.

`pair_cost` is told the objectives of each cell, as an operator would tell a router. All others would not heed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from diptych.router.choose.policies import POLICIES
from diptych.router.choose.policies.policy import NO_OBJECTIVES, Objectives
from routing.family import Member
from routing.fleet import Fleet
from routing.outcome import Outcome, outcome

OURS: Final = "pair_cost"
HELD: Final = (OURS, "cache_aware", "prefix_hash", "least_load")  # also held to one worker a request, and to two
MIN_GOODPUT: Final = 0.02  # where no policy has more, a cell compares nothing


class Cell(NamedTuple):
    """The goodput under one pair of objectives."""

    own: float
    best: float

    @property
    def ratio(self) -> float:
        return self.own / self.best if self.best >= MIN_GOODPUT else 1.0


@dataclass(frozen=True, slots=True)
class Contest:
    """What came of one member."""

    member: Member
    untold: Outcome  # of `pair_cost` without objectives
    told: Mapping[Objectives, Outcome]  # and with those of each cell
    others: Mapping[str, Outcome]

    @property
    def name(self) -> str:
        fleet = self.member.fleet
        num_prefill, num_decode = len(fleet.prefill_ids), len(fleet.decode_ids)
        return f"{self.member.seed}: {f'{num_prefill} unified' if fleet.is_unified else f'{num_prefill}P{num_decode}D'}"

    @property
    def cells(self) -> Sequence[Cell]:
        return [Cell(found.goodput(*wanted), self._best(wanted)) for wanted, found in self.told.items()]

    @property
    def untold_cells(self) -> Sequence[Cell]:
        return [Cell(self.untold.goodput(*wanted), self._best(wanted)) for wanted in self.told]

    def _best(self, wanted: Objectives) -> float:
        return max(found.goodput(*wanted) for found in self.others.values())


def hold(member: Member) -> Contest:
    others = {name: _run(member, fleet, policy) for name, fleet, policy in _singles(member.fleet)}
    told = {wanted: _run(member, member.fleet, OURS, wanted) for wanted in member.objectives}
    return Contest(member, _run(member, member.fleet, OURS), told, others)


def _singles(fleet: Fleet) -> Iterator[tuple[str, Fleet, str]]:
    yield from ((policy, fleet, policy) for policy in POLICIES if policy != OURS)
    if fleet.is_unified:
        one = replace(fleet, may_pair=lambda pair: pair.is_local)
        two = replace(fleet, may_pair=lambda pair: not pair.is_local)
        yield from ((f"{policy}, always one", one, policy) for policy in HELD)
        yield from ((f"{policy}, always two", two, policy) for policy in HELD)


def _run(member: Member, fleet: Fleet, policy: str, objectives: Objectives = NO_OBJECTIVES) -> Outcome:
    jobs = fleet.replay(POLICIES[policy], objectives).open_loop(member.requests, 1.0)
    return outcome(jobs, fleet.prefill_ids)
