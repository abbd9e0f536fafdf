"""Small requests that must be quick beside 15 % of 16K tokens that need not: two H200s, in virtual time.

The load is the generator `bimodal`. On the same arrivals are measured

- *apart*: one prefill and one decode worker,
- *replicas*: two workers, each of which serves every second request alone,
- *adaptive*: two unified workers, the policy `adaptive`, and the SLOs of both tiers told.

A row's value is the 99th percentile of the small requests' times to the first token; beside it are the shares of both
tiers that are served within their SLOs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from report import Report, arguments
from slo_cells import ADAPTIVE, APART, REPLICA

from diptych.generation.slo import Slo
from diptych.simulator.outcome import Outcome
from diptych.simulator.run import simulate
from diptych.simulator.traces.call import Call
from diptych.simulator.traces.columns import calls_of
from diptych.simulator.traces.generators.bimodal import bimodal

TIERS: Final = {"tight": Slo(0.06, 0.02), "batch": Slo(20.0, 0.05)}
WANTED_MS: Final = 60.0
RATES: Final = (6.0, 10.0)  # a second
SEEDS: Final = (0, 1)
NUM_CALLS: Final = 600
QUICK_CALLS: Final = 100

Served = Sequence[tuple[Outcome, Sequence[Call]]]


def main() -> None:
    args = arguments(__doc__).parse_args()
    with Report(as_json=args.json) as report:
        for rate in RATES:
            for seed in SEEDS:
                calls = calls_of(bimodal(QUICK_CALLS if args.quick else NUM_CALLS, rate, seed))
                for name, served in _served(calls).items():
                    p99_ms, shares = 1e3 * _first_s(served, "tight"), {tier: _share(served, tier) for tier in TIERS}
                    case = f"{rate:g}/s, seed {seed}, {name}"
                    report.row("slo_bimodal", case, p99_ms, "ms", WANTED_MS, "wanted", p99_ms / WANTED_MS, shares)


def _served(calls: Sequence[Call]) -> Mapping[str, Served]:
    return {
        "apart": [(simulate(APART, calls), calls)],
        "replicas": [(simulate(REPLICA, calls[turn::2]), calls[turn::2]) for turn in range(2)],
        "adaptive": [(simulate(replace(ADAPTIVE, tiers=TIERS), calls), calls)],
    }


def _first_s(served: Served, tier: str) -> float:
    """Return the 99th percentile of the times to the first token of a tier."""
    firsts = [outcome.ttft_s[[call.tier == tier for call in calls]] for outcome, calls in served]
    return float(np.nanquantile(np.concatenate(firsts), 0.99))


def _share(served: Served, tier: str) -> float:
    """Return the share of a tier's requests that were served within its SLO."""
    slo = TIERS[tier]
    good = [
        ((outcome.ttft_s <= slo.ttft_s) & (outcome.tpot_s <= slo.tpot_s))[[call.tier == tier for call in calls]]
        for outcome, calls in served
    ]
    return float(np.concatenate(good).mean())


if __name__ == "__main__":
    main()
