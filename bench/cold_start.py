"""Whether first tokens hold while a load rises and workers take long to start: the planner, in virtual time.

Calls of generated code come at a rate that stays, rises in a line to four times of it, and stays again; the seed is one
that nothing was tuned to. The planner begins with one unified worker, may have four, and each more takes as long to
start as the case says. Hindsight knows when the rate will be how high: it has one more worker ready for each so many
calls a second, and of several such numbers the one that is cheapest among those that serve nearly the most. It asks for
them as much sooner as they take to start.

A row's value is the 90th percentile of the times to the first token of all calls that were *offered*; its limit is the
SLO. Beside it are that of hindsight, the share served within the SLO of both and of what the fluid bound allows, the
planner's GPU-hours over those of hindsight, and what roles and KV were moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from report import Report, arguments

from diptych.cli.plans.simulation import workers_of
from diptych.generation.slo import Slo
from diptych.planner.planner import Planner
from diptych.planner.values import Limits
from diptych.simulator.fluid import fluid
from diptych.simulator.report.summary import Summary, summary
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, Start, WorkerSetup
from diptych.simulator.traces.call import Call
from diptych.simulator.traces.generators.named import generate

STARTS_S: Final = (0.0, 100.0, 200.0, 300.0)
SLO: Final = Slo(4.0, 0.03)
LOW, HIGH = 0.4, 1.6  # calls a second
STAYS_S, RISES_S = 150.0, 600.0  # before it rises, and behind that again
MOST: Final = 4  # workers
EACH: Final = (0.4, 0.55, 0.7)  # calls a second for which hindsight has one worker
NEARLY: Final = 0.99
SEED: Final = 7101
QUICK: Final = 10.0  # times shorter


class Hindsight(NamedTuple):
    """What is done by who knows the load, where workers need no time to start."""

    found: Summary
    asked_s: Sequence[float]  # for one more worker

    def gpu_hours(self, start_s: float) -> float:
        """Return what it takes where each must be asked for so much sooner."""
        return self.found.gpu_hours + sum(min(start_s, at_s) for at_s in self.asked_s) / 3600


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--starts", nargs="+", type=float, default=STARTS_S, help="seconds that a worker takes")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    shorter = QUICK if args.quick else 1.0
    calls = rising(args.seed, shorter)
    most_good = fluid(calls, [SLO] * len(calls), WorkerSetup(), MOST).most_good
    with Report(as_json=args.json) as report:
        best = hindsight(calls, shorter)
        for start_s in args.starts:
            setup = replace(_setup(), more=WorkerSetup(start_s=start_s), bounds=Limits(budget_gpus=MOST))
            ours, other = summary(simulate(setup, calls, Planner()), SLO), best.found
            beside = {
                "p90 of hindsight, s": other.ttft_s.p90,
                "served well": ours.good / ours.offered,
                "of hindsight's": ours.good / max(1, other.good),
                "of the fluid bound": ours.good / most_good,
                "GPU-hours": ours.gpu_hours,
                "of hindsight's hours": ours.gpu_hours / best.gpu_hours(start_s),
                "flips": float(ours.flips),
                "moved GB": ours.moved_gb,
            }
            case, p90_s = f"{len(calls)} calls, a start takes {start_s:g} s", ours.ttft_s.p90
            report.row("cold_start", case, p90_s, "s", SLO.ttft_s, "wanted", SLO.ttft_s / p90_s, beside)


def _setup() -> Setup:
    return Setup(workers_of(("unified=1",), WorkerSetup()), slo=SLO)


def hindsight(calls: Sequence[Call], shorter: float) -> Hindsight:
    """Return the cheapest of the ways that serve nearly as many calls well as the best one."""
    tried = [_ahead(calls, each, shorter) for each in EACH]
    enough = NEARLY * max(each.found.good for each in tried)
    return min((each for each in tried if each.found.good >= enough), key=lambda each: each.found.gpu_hours)


def _ahead(calls: Sequence[Call], each: float, shorter: float) -> Hindsight:
    """Have one worker ready for each so many calls a second."""
    slope = (HIGH - LOW) / (RISES_S / shorter)
    rates = [number * each for number in range(1, MOST) if number * each < HIGH]
    asked_s = [STAYS_S / shorter + max(0.0, rate - LOW) / slope if rate > LOW else 0.0 for rate in rates]
    starts = tuple(Start(at_s, WorkerSetup(start_s=0.0)) for at_s in asked_s)
    return Hindsight(summary(simulate(replace(_setup(), actions=starts), calls), SLO), asked_s)


def rising(seed: int, shorter: float = 1.0) -> Sequence[Call]:
    """Return calls whose rate rises: those of a steady rate at other times, in the same order."""
    stays_s, rises_s = STAYS_S / shorter, RISES_S / shorter
    at_s = np.array([0.0, *np.linspace(stays_s, stays_s + rises_s, 64), 2 * stays_s + rises_s])
    rate = np.interp(at_s, [stays_s, stays_s + rises_s], [LOW, HIGH])
    come = np.concatenate([[0.0], np.cumsum(np.diff(at_s) * (rate[1:] + rate[:-1]) / 2)])  # calls until then
    calls = generate("code", max(2, round(come[-1])), 1.0, seed)
    return [replace(call, arrival_s=float(np.interp(call.arrival_s, come, at_s))) for call in calls]


if __name__ == "__main__":
    main()
