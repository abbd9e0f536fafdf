"""The planner on loads of several shapes, beside what the same platform does with the load known beforehand.

Rates swing like a day, jump to ten times, rise and fall like a saw; long prompts come at once at a quiet time; all
workers die with their caches; one worker takes three times as long for each step; one tenant sends nine of ten calls.
Seeds are ones that nothing was tuned to. The planner begins with two unified workers, may have four, and each more
takes 30 s to start.

Hindsight is the cheapest of those ways that serve 0.99 of the most: each fixed number of workers, and one more worker
for each so many calls a second, ready when the rate gets there and gone when it is below. It pays for starts as well.
A row is the goodput of the planner over that of hindsight; beside it are its share of all offered calls, GPU-hours over
those of hindsight, roles changed in ten minutes, and how often the fleet went from growing to shrinking or back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from report import Report, arguments

from diptych.engine.values.step_model import StepModel
from diptych.generation.slo import Slo
from diptych.planner.planner import Planner
from diptych.planner.values import Limits, Observed, Plan
from diptych.simulator.report.summary import Summary, summary
from diptych.simulator.run import simulate
from diptych.simulator.setup import Action, Drain, Kill, Setup, Start, WorkerSetup
from diptych.simulator.traces.call import Call
from diptych.simulator.traces.columns import unshared
from diptych.simulator.traces.generators.named import generate

MOST: Final = 4  # workers
BEGIN: Final = 2
START_S: Final = 30.0
NEARLY: Final = 0.99
WANTED: Final = 0.9
SEED: Final = 7201
QUICK: Final = 20.0  # times shorter
EACH: Final = {"code": (0.4, 0.55, 0.7), "chat": (0.8, 1.2), "bimodal": ()}  # calls a second of one worker
SLOS: Final = {"code": Slo(4.0, 0.03), "chat": Slo(2.0, 0.03), "bimodal": Slo(3.0, 0.03)}
HEAP, HEAP_LEN, HEAP_EVERY_S, HEAP_S = 24, 40_000, 400.0, 30.0  # long prompts that come within so many seconds
SLOWER: Final = 3.0
BIG_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Shape:
    """A rate over time, of calls as a generator makes them, and what happens beside."""

    kind: str
    rates: Sequence[tuple[float, float]]  # seconds and calls a second; straight lines between
    heaps: bool = False  # of long prompts
    dies_s: float = 0.0  # when all workers of the beginning die; 0: never
    is_slow: bool = False  # the first worker
    has_big_tenant: bool = False

    @property
    def span_s(self) -> float:
        return self.rates[-1][0]


def _wave(low: float, high: float, period_s: float, span_s: float) -> list[tuple[float, float]]:
    at_s = np.linspace(0.0, span_s, 65)
    rate = (low + high) / 2 - (high - low) / 2 * np.cos(2 * np.pi * at_s / period_s)
    return list(zip(at_s.tolist(), rate.tolist(), strict=True))


def _saw(low: float, high: float, tooth_s: float, number: int) -> list[tuple[float, float]]:
    return [point for n in range(number) for point in ((n * tooth_s + 0.001, low), ((n + 1) * tooth_s, high))]


def _flat(rate: float, span_s: float) -> list[tuple[float, float]]:
    return [(0.0, rate), (span_s, rate)]


SHAPES: Final[Mapping[str, Shape]] = {
    "day": Shape("code", _wave(0.3, 1.3, 1200.0, 2400.0)),
    "tenfold": Shape("code", [(0.0, 0.15), (400.0, 0.15), (400.001, 1.5), (1200.0, 1.5)]),
    "saw": Shape("code", _saw(0.3, 1.4, 400.0, 4)),
    "night": Shape("chat", _flat(0.5, 1600.0), heaps=True),
    "restart": Shape("chat", _flat(2.0, 1200.0), dies_s=600.0),
    "slow": Shape("code", _flat(0.8, 1200.0), is_slow=True),
    "tenant": Shape("chat", _flat(2.5, 1200.0), has_big_tenant=True),
    "bimodal": Shape("bimodal", _flat(6.0, 3600.0)),
}


@dataclass(slots=True)
class Watched:
    """A planner of which is kept how many workers it wanted."""

    planner: Planner = field(default_factory=Planner)
    wanted: list[int] = field(default_factory=list)

    @property
    def every_s(self) -> float:
        return self.planner.every_s

    def __call__(self, observed: Observed) -> Plan:
        made = self.planner(observed)
        self.wanted.append(made.sizes.total)
        return made

    @property
    def turns(self) -> int:
        """Return how often the fleet went from growing to shrinking or back."""
        ways = [after > before for before, after in itertools.pairwise(self.wanted) if before != after]
        return sum(one != other for one, other in itertools.pairwise(ways))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--seed", type=int, default=SEED, help="of the first shape; each has its own")
    args = parser.parse_args()
    with Report(as_json=args.json) as report:
        for name in args.shapes:
            shape = _shorter(SHAPES[name], QUICK if args.quick else 1.0)
            _measure(report, name, shape, args.seed + list(SHAPES).index(name))


def _shorter(shape: Shape, times: float) -> Shape:
    rates = [(at_s / times, rate) for at_s, rate in shape.rates]
    return replace(shape, rates=rates, dies_s=shape.dies_s / times)


def _measure(report: Report, name: str, shape: Shape, seed: int) -> None:
    slo, calls = SLOS[shape.kind], calls_of(shape, seed)
    setup, watched = _setup(shape, BEGIN), Watched()
    outcome = simulate(replace(setup, more=WorkerSetup(start_s=START_S)), calls, watched)
    ours = summary(outcome, slo)
    best, hours = hindsight(shape, calls)
    beside = {
        "served well": ours.good / ours.offered,
        "GPU-hours": ours.gpu_hours,
        "of hindsight's hours": ours.gpu_hours / hours,
        "hindsight served well": best.good / best.offered,
        "flips in 10 min": 600 * ours.flips / ours.virtual_s,
        "turns": float(watched.turns),
    }
    share = ours.good / max(1, best.good)
    case = f"{name}, seed {seed}, {len(calls)} calls"
    report.row("shapes", case, share, "of hindsight's goodput", WANTED, "wanted", share / WANTED, beside)


def calls_of(shape: Shape, seed: int) -> Sequence[Call]:
    """Return calls of a steady rate at other times, in the same order, and the heaps among them."""
    at_s, rate = np.array(shape.rates).T
    at_s, rate = np.append(0.0, at_s), np.append(rate[0], rate)
    come = np.append(0.0, np.cumsum(np.diff(at_s) * (rate[1:] + rate[:-1]) / 2))  # calls until then
    steady = generate(shape.kind, max(2, round(come[-1])), 1.0, seed)
    calls = [replace(each, arrival_s=float(np.interp(each.arrival_s, come, at_s))) for each in steady]
    rng = np.random.default_rng(seed)
    if shape.has_big_tenant:
        calls = [replace(each, tenant="big" if rng.random() < BIG_SHARE else "small") for each in calls]
    if shape.heaps:
        calls += _heaps(shape, rng)
    return sorted(calls, key=lambda each: each.arrival_s)


def _heaps(shape: Shape, rng: np.random.Generator) -> list[Call]:
    begins = np.arange(HEAP_EVERY_S / 2, shape.span_s, HEAP_EVERY_S)
    arrivals = np.concatenate([np.zeros(0), *(begin + np.sort(rng.uniform(0, HEAP_S, HEAP)) for begin in begins)])
    whole = np.ones(len(arrivals), np.int64)
    found = unshared(arrivals, whole * HEAP_LEN, whole * 100)
    return [replace(each, blocks=each.blocks + np.uint64(1 << 63)) for each in found]  # the others' are not theirs


def _setup(shape: Shape, num_workers: int) -> Setup:
    slow = StepModel.of(seconds * SLOWER for seconds in WorkerSetup().step_model.terms)
    first = WorkerSetup(step_model=slow) if shape.is_slow else WorkerSetup()
    kills = tuple(Kill(shape.dies_s, number + 1) for number in range(num_workers)) if shape.dies_s else ()
    workers = (first, *[WorkerSetup()] * (num_workers - 1))
    return Setup(workers, slo=SLOS[shape.kind], actions=kills, bounds=Limits(budget_gpus=MOST))


def hindsight(shape: Shape, calls: Sequence[Call]) -> tuple[Summary, float]:
    """Return the cheapest of the ways that serve nearly as many calls well as the best one, and its GPU-hours."""
    tried = [_fixed(shape, calls, number) for number in range(1, MOST + 1)]
    if len({rate for _, rate in shape.rates}) > 1:
        tried += [_ahead(shape, calls, each) for each in EACH[shape.kind]]
    enough = NEARLY * max(found.good for found, _ in tried)
    return min((each for each in tried if each[0].good >= enough), key=lambda each: each[1])


def _fixed(shape: Shape, calls: Sequence[Call], number: int) -> tuple[Summary, float]:
    setup = _setup(shape, number)
    again = [Start(shape.dies_s, WorkerSetup())] * number if shape.dies_s else []
    found = summary(simulate(replace(setup, actions=(*setup.actions, *again)), calls), setup.slo)
    return found, found.gpu_hours + len(again) * START_S / 3600


def _ahead(shape: Shape, calls: Sequence[Call], each: float) -> tuple[Summary, float]:
    """Have one worker ready for each so many calls a second."""
    at_s = np.linspace(0.0, shape.span_s, 256)
    rates = np.interp(at_s, *np.array(shape.rates).T)
    wanted = np.clip(np.ceil(rates / each), 1, MOST).astype(int).tolist()
    setup, actions = _setup(shape, wanted[0]), tuple(_changes(at_s.tolist(), wanted))
    found = summary(simulate(replace(setup, actions=actions), calls), setup.slo)
    starts_s = sum(min(START_S, action.at_s) for action in actions if isinstance(action, Start))
    return found, found.gpu_hours + starts_s / 3600


def _changes(at_s: Sequence[float], wanted: Sequence[int]) -> Iterator[Action]:
    there, num_ever = list(range(1, wanted[0] + 1)), wanted[0]
    for when_s, number in zip(at_s, wanted, strict=True):
        while len(there) < number:
            num_ever += 1
            there.append(num_ever)
            yield Start(when_s, WorkerSetup())
        while len(there) > number:
            yield Drain(when_s, there.pop())


if __name__ == "__main__":
    main()
