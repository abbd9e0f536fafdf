"""A member of the family under `pair_cost` and under every other policy; unified workers also as one, and as two.

`pair_cost` is told the objectives of each cell, as an operator would tell a router. All others would not heed them.

One load and one policy still have many outcomes: names of workers, turns and draws are arbitrary (`Fleet.drawn`), and
what they change first changes all that comes after it. So each run may be repeated with others (`Cell`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from diptych.generation.slo import NO_SLO, Slo
from diptych.router.choose.policies import POLICIES
from routing.cell import Cell, Goodputs
from routing.family import Member
from routing.fleet import Fleet
from routing.outcome import Outcome, outcome

OURS: Final = "pair_cost"
HELD: Final = (OURS, "cache_aware", "prefix_hash", "least_load")  # also held to one worker a request, and to two


@dataclass(frozen=True, slots=True)
class Contest:
    """What came of one member, by drawing."""

    member: Member
    untold: Sequence[Outcome]  # of `pair_cost` without objectives
    told: Mapping[Slo, Sequence[Outcome]]  # and with those of each cell
    others: Mapping[str, Sequence[Outcome]]

    @property
    def name(self) -> str:
        fleet = self.member.fleet
        num_prefill, num_decode = len(fleet.prefill_ids), len(fleet.decode_ids)
        return f"{self.member.seed}: {f'{num_prefill} unified' if fleet.is_unified else f'{num_prefill}P{num_decode}D'}"

    @property
    def cells(self) -> Sequence[Cell]:
        return [self._cell(wanted, found) for wanted, found in self.told.items()]

    @property
    def untold_cells(self) -> Sequence[Cell]:
        return [self._cell(wanted, self.untold) for wanted in self.told]

    @property
    def fewest_missed(self) -> int:
        """Return how many cells that one of the others misses which misses fewest: each has to do for all cells."""
        return min(sum(cell.misses(name) for cell in self.untold_cells) for name in self.others)

    def _cell(self, wanted: Slo, own: Sequence[Outcome]) -> Cell:
        others = {name: _goodputs(found, wanted) for name, found in self.others.items()}
        return Cell(_goodputs(own, wanted), others)


def _goodputs(found: Sequence[Outcome], wanted: Slo) -> Goodputs:
    return tuple(one.goodput(wanted.ttft_s, wanted.tpot_s) for one in found)


def hold(member: Member, num_drawings: int = 1) -> Contest:
    fleets = [member.fleet.drawn(number) for number in range(num_drawings)]
    names = [name for name, _, _ in _singles(member.fleet)]
    runs = [[_run(member, fleet, policy) for _, fleet, policy in _singles(drawn)] for drawn in fleets]
    others = dict(zip(names, zip(*runs, strict=True), strict=True))
    told = {wanted: [_run(member, fleet, OURS, wanted) for fleet in fleets] for wanted in member.objectives}
    return Contest(member, [_run(member, fleet, OURS) for fleet in fleets], told, others)


def _singles(fleet: Fleet) -> Iterator[tuple[str, Fleet, str]]:
    yield from ((policy, fleet, policy) for policy in POLICIES if policy != OURS)
    if fleet.is_unified:
        one = replace(fleet, may_pair=lambda pair: pair.is_local)
        two = replace(fleet, may_pair=lambda pair: not pair.is_local)
        yield from ((f"{policy}, always one", one, policy) for policy in HELD)
        yield from ((f"{policy}, always two", two, policy) for policy in HELD)


def _run(member: Member, fleet: Fleet, policy: str, objectives: Slo = NO_SLO) -> Outcome:
    jobs = fleet.replay(POLICIES[policy], objectives).open_loop(member.requests, 1.0)
    return outcome(jobs, fleet.prefill_ids)
