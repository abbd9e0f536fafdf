"""Whether first tokens hold while a load rises and workers take long to start: the planner, in virtual time.

Calls of generated code come at a rate that stays, rises in a line to four times of it, and stays again; the seed is one
that nothing was tuned to. The planner begins with one unified worker, may have four, and each more takes as long to
start as the case says. Hindsight knows the load, and has the best plan that a search finds in the same simulator, in
which workers need no time to start; with each start it asks for the same workers as much sooner.

A row's value is the 90th percentile of the times to the first token of all calls that were *offered*; its limit is the
SLO. Beside it are that of hindsight, the share served within the SLO of both and of what the fluid bound allows, the
planner's GPU-hours over those of hindsight, and what roles and KV were moved.
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
from diptych.simulator.fluid import fluid
from diptych.simulator.hindsight import Trial, hindsight
from diptych.simulator.outcome import Outcome
from diptych.simulator.report.summary import Summary, summary
from diptych.simulator.run import simulate
from diptych.simulator.setup import Action, Setup, Start, WorkerSetup
from diptych.simulator.traces.call import Call
from diptych.simulator.traces.generators.named import generate

STARTS_S: Final = (0.0, 50.0, 100.0, 200.0, 300.0)
SLO: Final = Slo(4.0, 0.03)
LOW, HIGH = 0.4, 1.6  # calls a second
STAYS_S, RISES_S = 300.0, 900.0  # before it rises, and behind that again
MOST: Final = 4  # workers
POLICY: Final = "adaptive"
SEED: Final = 7101
QUICK: Final = 20.0  # times shorter
MOST_HOURS: Final = 1.1  # of hindsight's


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--starts", nargs="+", type=float, default=STARTS_S, help="seconds that a worker takes")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    calls = rising(args.seed, QUICK if args.quick else 1.0)
    begin, soon = workers_of(("unified=1",), WorkerSetup()), WorkerSetup(start_s=0.0)
    setup = Setup(begin, POLICY, slo=SLO, more=soon, bounds=Limits(budget_gpus=MOST))
    found = hindsight(setup, calls, (POLICY,), lambda outcome: summary(outcome, SLO).good, MOST)
    best = max(found.static, found.divided, key=lambda each: (each.good, -each.gpu_hours))
    most_good = fluid(calls, [SLO] * len(calls), WorkerSetup(), MOST).most_good
    with Report(as_json=args.json) as report:
        for start_s in args.starts:
            setup = replace(setup, more=WorkerSetup(start_s=start_s))
            planned, hinted = simulate(setup, calls, Planner()), _hinted(setup, best, calls)
            _row(report, f"{len(calls)} calls, a start takes {start_s:g} s", planned, hinted, most_good)


def _row(report: Report, case: str, planned: Outcome, hinted: Outcome, most_good: float) -> None:
    ours, other = summary(planned, SLO), summary(hinted, SLO)
    beside = {
        "p90 of hindsight, s": other.ttft_s.p90,
        "served well": ours.good / ours.offered,
        "of hindsight's": ours.good / max(1, other.good),
        "of the fluid bound": ours.good / most_good,
        "GPU-hours": ours.gpu_hours,
        "of hindsight's hours": ours.gpu_hours / other.gpu_hours,
        **_moved(ours),
    }
    report.row("cold_start", case, ours.ttft_s.p90, "s", SLO.ttft_s, "wanted", ours.ttft_s.p90 / SLO.ttft_s, beside)


def _moved(ours: Summary) -> dict[str, float]:
    return {"flips": float(ours.flips), "moved GB": ours.moved_gb}


def _hinted(setup: Setup, best: Trial, calls: Sequence[Call]) -> Outcome:
    """Run what hindsight would do, with workers that are asked for as much sooner as they take to start."""
    roles = workers_of(tuple(f"{name}={number}" for name, number in _named(best)), replace(setup.more, start_s=0.0))
    return simulate(replace(setup, workers=roles, actions=tuple(_sooner(each, setup) for each in best.actions)), calls)


def _named(trial: Trial) -> list[tuple[str, int]]:
    names = zip(("prefill", "decode", "unified"), trial.sizes, strict=True)
    return [(name, number) for name, number in names if number]


def _sooner(action: Action, setup: Setup) -> Action:
    if not isinstance(action, Start):
        return action
    start_s = min(setup.more.start_s, action.at_s)
    return Start(action.at_s - start_s, replace(setup.more, role=action.worker.role, start_s=start_s))


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
