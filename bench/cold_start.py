"""What the planner makes of a load that triples while workers take 0 to 300 s to start, in virtual time.

Prompts of 32,000 tokens and outputs of 50 come for 10 minutes at a rate for one worker, for 10 at three times that,
which is reached in the course of 5 minutes, and again at the first. The planner begins with one unified worker and may
have four. A row is the 90th percentile of the times to the first token of all calls that were offered; beside it are
the calls within the SLO, and GPU-hours over those of hindsight, which knows the load and whose workers start at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from report import Report, arguments

from diptych.cli.plans.simulation import workers_of
from diptych.generation.slo import Slo
from diptych.planner.planner import Planner
from diptych.planner.values import Limits
from diptych.simulator.hindsight import hindsight
from diptych.simulator.report.summary import summary
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, WorkerSetup
from diptych.simulator.traces.call import Call
from diptych.simulator.traces.columns import unshared

PROMPT_LEN, OUTPUT_LEN = 32_000, 50
SLO: Final = Slo(6.0, 0.1)
RATES: Final = ((0.0, 0.4), (600.0, 0.4), (900.0, 1.2), (1500.0, 1.2), (1800.0, 0.4), (2400.0, 0.4))  # s, calls/s
QUICK: Final = 0.1  # of the time
MOST: Final = 4  # workers
STARTS_S: Final = (0.0, 30.0, 60.0, 120.0, 200.0, 300.0)
POLICIES: Final = ("pair_cost",)
SEED: Final = 8001


def load(share: float) -> Sequence[Call]:
    """Return the calls, which come at random, of so much of the time."""
    times, rates = np.array(RATES).T
    seconds = np.arange(0.0, times[-1] * share)
    rng = np.random.default_rng(SEED)
    counts = rng.poisson(np.interp(seconds / share, times, rates))
    arrivals = np.sort(np.repeat(seconds, counts) + rng.random(counts.sum()))
    number = len(arrivals)
    return unshared(arrivals, np.full(number, PROMPT_LEN), np.full(number, OUTPUT_LEN))


def main() -> None:
    args = arguments(__doc__).parse_args()
    calls = load(QUICK if args.quick else 1.0)
    starts_s = STARTS_S[:2] if args.quick else STARTS_S
    begin = workers_of(("unified=1",), WorkerSetup())
    setup = Setup(begin, POLICIES[0], slo=SLO, more=WorkerSetup(), bounds=Limits(budget_gpus=MOST))
    with Report(as_json=args.json) as report:
        found = hindsight(setup, calls, POLICIES, lambda outcome: summary(outcome, SLO).good, MOST)
        best = max(found.static, found.divided, key=lambda each: each.good)
        for start_s in starts_s:
            outcome = simulate(replace(setup, more=WorkerSetup(start_s=start_s)), calls, Planner())
            ttft_s = np.where(np.isnan(outcome.ttft_s), np.inf, outcome.ttft_s)
            late_s = float(np.quantile(ttft_s, 0.9, method="higher"))
            beside = {
                "within the SLO": summary(outcome, SLO).good / len(calls),
                "hindsight": best.good / len(calls),
                "GPU-hours of hindsight's": outcome.gpu_s / 3600 / best.gpu_hours,
                "flips": float(outcome.num_flips),
            }
            case = f"{len(calls)} calls, workers start in {start_s:g} s"
            report.row("cold start", case, 1e3 * late_s, "ms", 1e3 * SLO.ttft_s, "wanted", SLO.ttft_s / late_s, beside)


if __name__ == "__main__":
    main()
