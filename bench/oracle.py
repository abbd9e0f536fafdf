"""The planner beside what it could have done: hindsight searched in the same simulator, and the fluid bound.

Loads are generated from seeds that nothing was tuned to. The planner begins with two unified workers, may have four,
and each more takes 30 s to start. Hindsight knows the load: the best fixed division of up to four workers, by the
policies `pair_cost` and `adaptive`, and from it the best single changes between four windows. A row is the goodput of
the planner over that of hindsight; beside it are GPU-hours over those of hindsight, the share of the fluid bound, and
how many roles changed in ten minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Final, NamedTuple

from report import Report, arguments

from diptych.cli.plans.simulation import workers_of
from diptych.generation.slo import Slo
from diptych.planner.planner import Planner
from diptych.planner.values import Limits
from diptych.simulator.fluid import fluid
from diptych.simulator.hindsight import hindsight
from diptych.simulator.report.summary import summary
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, WorkerSetup
from diptych.simulator.traces.generators.named import generate

MOST: Final = 4  # workers
START_S: Final = 30.0
POLICIES: Final = ("pair_cost", "adaptive")
SPAN_S: Final = 480.0
QUICK_S: Final = 20.0
WANTED: Final = 0.9
SEED: Final = 7001


class Load(NamedTuple):
    """Calls a second, and their SLO."""

    rate: float
    slo: Slo


LOADS: Final[Mapping[str, Load]] = {
    "chat": Load(2.5, Slo(2.0, 0.03)),
    "code": Load(0.8, Slo(4.0, 0.03)),
    "bursty": Load(5.0, Slo(0.5, 0.03)),
    "bimodal": Load(6.0, Slo(3.0, 0.03)),
}


def main() -> None:
    args = _arguments()
    with Report(as_json=args.json) as report:
        for number, name in enumerate(args.loads):
            _measure(report, name, SEED + number, QUICK_S if args.quick else args.span)


def _measure(report: Report, name: str, seed: int, span_s: float) -> None:
    rate, slo = LOADS[name]
    calls = generate(name, max(2, round(rate * span_s)), rate, seed)
    slos = [slo] * len(calls)
    worker = WorkerSetup(start_s=START_S)
    begin = workers_of(("unified=2",), WorkerSetup())
    setup = Setup(begin, POLICIES[0], slo=slo, more=worker, bounds=Limits(budget_gpus=MOST))
    planned = simulate(setup, calls, Planner())
    found = hindsight(setup, calls, POLICIES, lambda outcome: summary(outcome, slo).good, MOST)
    best = max(found.static, found.divided, key=lambda each: (each.good, -each.gpu_hours))
    good = summary(planned, slo).good
    bound = fluid(calls, slos, worker, MOST)
    beside = {
        "GPU-hours of hindsight's": planned.gpu_s / 3600 / best.gpu_hours,
        "of the fluid bound": good / bound.most_good,
        "hindsight of it": best.good / bound.most_good,
        "flips in 10 min": 600 * planned.num_flips / planned.virtual_s,
    }
    case = f"{name} {rate:g}/s, seed {seed}, {len(calls)} calls, {best.policy} with {best.sizes}"
    share = good / best.good
    report.row("oracle", case, share, "of hindsight's goodput", WANTED, "wanted", share / WANTED, beside)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--span", type=float, default=SPAN_S, help="seconds of arrivals")
    return parser.parse_args()


if __name__ == "__main__":
    main()
