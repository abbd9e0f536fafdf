"""The planner acts on a simulated platform: real schedulers and routing, and workers that take a minute to start."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from diptych.generation.slo import Slo
from diptych.planner.planner import Planner
from diptych.planner.values import Limits, Observed, Plan, Sizes
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, WorkerSetup
from diptych.simulator.traces.columns import unshared

WORKER = WorkerSetup(num_pages=1000, page_size=512)
SLO = Slo(ttft_s=2.0, tpot_s=0.05)
PARTS = ((0.4, 150.0), (1.2, 250.0), (0.2, 600.0))  # calls a second, and for how long


@dataclass
class Watched:
    """A planner whose plans are kept."""

    every_s: float = 15.0
    planner: Planner = field(default_factory=Planner)
    plans: list[tuple[float, Plan]] = field(default_factory=list)

    def __call__(self, observed: Observed) -> Plan:
        self.plans.append((observed.now_s, self.planner(observed)))
        return self.plans[-1][1]


def test_a_load_that_triples_is_followed_up_and_down() -> None:
    rng = np.random.default_rng(1)
    gaps = np.concatenate([rng.exponential(1 / rate, round(rate * seconds)) for rate, seconds in PARTS])
    arrivals, number = np.cumsum(gaps), len(gaps)
    calls = unshared(arrivals, np.full(number, 18_500), np.full(number, 20))
    limits = Limits(least=Sizes(both=1), most=Sizes(both=8), budget_gpus=8)
    setup = Setup((WORKER,), slo=SLO, more=replace(WORKER, start_s=60.0), bounds=limits)
    watched = Watched()
    outcome = simulate(setup, calls, watched)
    wanted = [plan.sizes.both for _, plan in watched.plans]
    kept = (outcome.ttft_s <= SLO.ttft_s) & (outcome.tpot_s <= SLO.tpot_s)
    grown_s = next(at_s for at_s, plan in watched.plans if plan.sizes.both > 1)
    assert (wanted[0], max(wanted), wanted[-1]) == (1, 2, 1)
    assert np.mean(kept[arrivals > grown_s + 90]) >= 0.95  # a start, and what had queued
    assert outcome.num_flips == 0
    assert outcome.gpu_s / outcome.virtual_s < 2.0
