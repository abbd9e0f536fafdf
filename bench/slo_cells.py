"""Whether one policy is never worse than the better of two: 9 SLOs by 6 loads on two H200s, in virtual time.

Each cell has an SLO and a load of equal requests that come at random. On it are measured, on the same arrivals,

- *apart*: one prefill and one decode worker,
- *replicas*: two workers, each of which serves every second request alone,
- *adaptive*: two unified workers, the policy `adaptive`, and the SLO told.

A cell's value is the share of the requests, of those that come after the start, that `adaptive` serves within the SLO;
its limit is the better of the other two. Steps take what those of Llama-3-8B take on an H200 (`H200_LLAMA_8B`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from report import Report, arguments

from diptych.common.members.roles import Role
from diptych.generation.slo import Slo
from diptych.simulator.outcome import Outcome
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, WorkerSetup
from diptych.simulator.traces.call import BLOCK_TOKENS, Call

TTFT_S: Final = (0.3, 1.0, 5.0)
TPOT_S: Final = (0.010, 0.025, 0.050)
WANTED: Final = 0.97
ARRIVALS_S: Final = 20.0
QUICK_S: Final = 4.0
PASS_S: Final = 0.007  # a token, about: a load counts from when its first requests are over

WORKER: Final = WorkerSetup()
APART: Final = Setup((replace(WORKER, role=Role.PREFILL), replace(WORKER, role=Role.DECODE)), policy="least_load")
REPLICA: Final = Setup((replace(WORKER, max_step_tokens=2048),), policy="round_robin")
ADAPTIVE: Final = Setup((WORKER, WORKER), policy="adaptive")


class Load(NamedTuple):
    """Requests of one kind."""

    prompt_len: int
    output_len: int
    rate: float  # a second

    @property
    def counts_from_s(self) -> float:
        return 1.0 + PASS_S * self.output_len

    def calls(self, arrivals_s: float) -> Sequence[Call]:
        """Return requests that share nothing, by Poisson arrivals: so many seconds of them that count."""
        rng, blocks = random.Random(self.prompt_len), -(-self.prompt_len // BLOCK_TOKENS)
        calls: list[Call] = []
        arrival_s = 0.0
        while arrival_s < self.counts_from_s + arrivals_s:
            names = np.arange(blocks, dtype=np.uint64) + np.uint64((len(calls) + 1) << 20)
            calls.append(Call(arrival_s, self.prompt_len, self.output_len, names))
            arrival_s += rng.expovariate(self.rate)
        return calls


LOADS: Final = (
    *(Load(2000, 1000, 5), Load(4000, 500, 4), Load(8000, 200, 2)),
    *(Load(2000, 1000, 8), Load(4000, 500, 7), Load(8000, 200, 3.5)),
)


class Served(NamedTuple):
    """When requests came, and how long theirs took; NaN: never."""

    arrival_s: npt.NDArray[np.float64]
    ttft_s: npt.NDArray[np.float64]
    tpot_s: npt.NDArray[np.float64]

    @staticmethod
    def of(outcomes: Sequence[Outcome]) -> Served:
        columns = ([getattr(each, name) for each in outcomes] for name in Served._fields)
        return Served(*map(np.concatenate, columns))

    def share(self, load: Load, slo: Slo) -> float:
        """Return the share of the requests that were served within an SLO."""
        is_good = (self.ttft_s <= slo.ttft_s) & (self.tpot_s <= slo.tpot_s)
        return float(is_good[self.arrival_s >= load.counts_from_s].mean())


def main() -> None:
    args = arguments(__doc__).parse_args()
    reached = []
    with Report(as_json=args.json) as report:
        for load in LOADS:
            reached += _cells(report, load, QUICK_S if args.quick else ARRIVALS_S)
        enough = sum(ratio >= WANTED for ratio in reached)
        report.row(
            "slo_cells", f"cells of at least {WANTED}", enough, "cells", len(reached), "all", enough / len(reached)
        )
        report.row("slo_cells", "worst cell", min(reached), "", WANTED, "target")


def _cells(report: Report, load: Load, arrivals_s: float) -> list[float]:
    """Measure the cells of a load; return the ratio of each to the better of the two others."""
    calls = load.calls(arrivals_s)
    others = {
        "apart": Served.of([simulate(APART, calls)]),
        "replicas": Served.of([simulate(REPLICA, calls[turn::2]) for turn in range(2)]),
    }
    ratios = []
    for slo in itertools.starmap(Slo, itertools.product(TTFT_S, TPOT_S)):
        ours = Served.of([simulate(replace(ADAPTIVE, slo=slo), calls)]).share(load, slo)
        shares = {name: served.share(load, slo) for name, served in others.items()}
        best = max(shares.values())
        ratios.append(ours / best if best else 1.0)
        case = f"{load.prompt_len}/{load.output_len} at {load.rate:g}/s, {slo.ttft_s:g} s and {1e3 * slo.tpot_s:g} ms"
        report.row("slo_cells", case, ours, "of all", best, "the better", ratios[-1], shares)
    return ratios


if __name__ == "__main__":
    main()
