"""What each pool of workers is scaled by, and what it needs next, in words. Pure.

The measures, their targets and the formula are those of `docs/operations/autoscaling.md`: for the sum of a measure over
a pool, and a target for each worker, it takes as many workers as sum and target say, unless that is within a tenth of
those that there are. The measure that asks for most counts. Targets are the chart's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from diptych.common.members.instances import computable_tokens, kv_demand, kv_occupancy, role_of
from diptych.common.members.record import State
from diptych.common.members.roles import LegKind, Role, WorkerRole
from diptych.router.choose.estimates import PRIOR_PREFILL
from diptych.router.choose.pools import Weights
from diptych.router.console.fleet.worker_facts import WorkerFacts
from diptych.router.console.state import PoolSignal

BACKLOG_S: Final = 10.0  # of prompts that wait at a worker
BUSY: Final = 0.7  # share of the time in which a worker computes prompts
KV_DEMAND: Final = 0.8  # share of its pages
TOLERANCE: Final = 0.1
_COMPUTING: Final = MappingProxyType({Role.ENCODE: "encoding images"})  # what keeps a role busy; else prompts
NO_WEIGHTS: Final[Weights] = MappingProxyType({})


class _Measure(NamedTuple):
    """One of the measures of a pool, in the mean of its ready workers."""

    name: str
    value: float
    target: float
    is_share: bool

    @property
    def ratio(self) -> float:
        return self.value / self.target

    def __str__(self) -> str:
        return f"{self.name} {self._words(self.value)} a worker"

    @property
    def limit(self) -> str:
        return self._words(self.target)

    def _words(self, value: float) -> str:
        return f"{value:.0%}" if self.is_share else f"{value:.1f} s"


def pool_signals(workers: Sequence[WorkerFacts], weights: Weights = NO_WEIGHTS) -> dict[str, PoolSignal]:
    """Return the pools, by role and name. `weights` are those of declared pools."""
    pools: dict[str, list[WorkerFacts]] = {}
    for each in workers:
        pools.setdefault(f"{role_of(each.record)} {each.record.pool}".strip(), []).append(each)
    return {name: _signal(members, weights.get(members[0].record.pool)) for name, members in sorted(pools.items())}


def _signal(members: Sequence[WorkerFacts], weight: float | None) -> PoolSignal:
    role: WorkerRole = members[0].view.role.value  # type: ignore[assignment]  # a worker's
    ready = [each for each in members if each.view.state is State.READY]
    backlog = _mean([backlog_s(each) for each in ready])
    return PoolSignal(
        role=role,
        num_workers=len(members),
        num_ready=len(ready),
        queue_s=None if backlog is None else round(backlog, 2),
        kv_share=round(_mean([kv_occupancy(each.reported) for each in ready]) or 0.0, 3),
        weight=weight,
        words=_words(ready, members, backlog),
    )


def _words(ready: Sequence[WorkerFacts], members: Sequence[WorkerFacts], backlog: float | None) -> str:
    if not ready:
        return f"none of {len(members)} is ready: {_why_none(members)}"
    measures = _measures(ready, backlog)
    if not measures:
        return "its workers have told nothing yet that it is scaled by"
    most = max(measures, key=lambda measure: measure.ratio)
    wanted = num_wanted(most.ratio, len(ready))
    if wanted > len(ready):
        return f"{most}: above {most.limit} more workers help, here {wanted - len(ready)}"
    if wanted < len(ready):
        return f"{most}: with {wanted} of {len(ready)} workers it would be below {most.limit}, too"
    return f"enough workers: {', '.join(f'{each} (up to {each.limit})' for each in measures)}"


def num_wanted(ratio: float, num_ready: int) -> int:
    """Return how many workers it takes where a measure is so many times its target: one at least."""
    if abs(ratio - 1) <= TOLERANCE:
        return num_ready
    return max(1, math.ceil(round(ratio * num_ready, 6)))


def _measures(ready: Sequence[WorkerFacts], backlog: float | None) -> list[_Measure]:
    role, found = ready[0].view.role, []
    if role.serves(LegKind.PREFILL):
        found.append(_Measure("queue", backlog or 0.0, BACKLOG_S, False))
    told = [each.status.prefill_busy for each in ready if each.status is not None]
    if told and role is not Role.DECODE:
        found.append(_Measure(_COMPUTING.get(role, "computing prompts"), _mean(told) or 0.0, BUSY, True))
    if role.serves(LegKind.DECODE):
        demand = _mean([kv_demand(each.reported) for each in ready]) or 0.0
        found.append(_Measure("KV demand", demand, KV_DEMAND, True))
    return found


def backlog_s(worker: WorkerFacts) -> float:
    """Return how long a worker will compute what waits and can be computed, as `PoolMember` does for metrics."""
    curve = PRIOR_PREFILL if worker.speed is None else worker.speed.prefill
    return curve.mean_slope * computable_tokens(worker.reported)


def _why_none(members: Sequence[WorkerFacts]) -> str:
    reasons = [each.view.not_ready or each.view.state.name.lower() for each in members]
    return max(set(reasons), key=reasons.count)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
