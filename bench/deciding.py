"""What it costs to decide: in a worker whether a late prompt goes first, in a router which pair, and what moves.

- *worker*: how long it takes to weigh a prompt that would be late against so many outputs with 10 ms a token. Steps in
  which one would be late have one such weighing, or two; others none. The limit is 10 us a step.
- *served*: the same over all steps of a load in virtual time in which prompts are late all the time (4,000 and 500
  tokens, 8 a second, 0.3 s and 10 ms, two workers): what the decisions of a step take in the mean.
- *router*: a choice by `adaptive`, and by `pair_cost`, among so many unified workers. The limit is 5 % of what a small
  chat takes of a router, 1 ms.
- *leaving*: a look at 1,024 outputs of workers that leave, one or 20 of 100 that are all linked; where others have
  room, and where nobody has. All streams wait meanwhile. The limit is 5 % of the time from one look to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from report import Report, arguments
from slo_cells import ADAPTIVE, Load

from diptych.engine.schedule.kv_forecast import OutputLengths
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.schedule.pace.token_deadlines import TokenDeadlines
from diptych.engine.values.request import new_request
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.slo import Slo
from diptych.router.choose.estimates import UNKNOWN
from diptych.router.choose.moves import LOOK_S, RunningOutput, departures
from diptych.router.choose.policies import POLICIES
from diptych.router.choose.policies.policy import Candidates, Policy, RequestView, Worker
from diptych.router.workers.worker_view import Pair, WorkerLoad
from diptych.simulator.run import simulate

SLO: Final = Slo(0.3, 0.010)
STEP_LIMIT_S: Final = 10e-6
ROUTER_LIMIT_S: Final = 0.05 * 1e-3
NUM_OUTPUTS: Final = (16, 64, 256)
NUM_WORKERS: Final = (4, 16, 64)
NUM_LEAVING: Final = (1, 20)  # of so many workers, with so many outputs in all
LINKED_WORKERS, LEAVING_OUTPUTS = 100, 1024
LOOK_LIMIT_S: Final = 0.05 * LOOK_S


def main() -> None:
    args = arguments(__doc__).parse_args()
    repeats = 200 if args.quick else 2000
    with Report(as_json=args.json) as report:
        for num_outputs in NUM_OUTPUTS:
            _worker(report, num_outputs, repeats)
        _served(report, 4.0 if args.quick else 20.0)
        for num_workers in NUM_WORKERS:
            _router(report, num_workers, repeats)
        for num_leaving in NUM_LEAVING:
            for num_tokens, words in ((4_000, "have room"), (4_000_000, "have none")):
                took_s = _leaving_s(num_leaving, num_tokens, max(5, repeats // 100))
                leave = f"{LEAVING_OUTPUTS} outputs leave {num_leaving} of {LINKED_WORKERS} workers"
                case = f"router, {leave}, others {words}"
                report.row("deciding", case, 1e3 * took_s, "ms", 1e3 * LOOK_LIMIT_S, "wanted", LOOK_LIMIT_S / took_s)


def _worker(report: Report, num_outputs: int, repeats: int) -> None:
    took_s = _weighing_s(num_outputs, repeats)
    case = f"worker, a late prompt weighed against {num_outputs} outputs"
    report.row("deciding", case, 1e6 * took_s, "us", 1e6 * STEP_LIMIT_S, "wanted", STEP_LIMIT_S / took_s)


def _weighing_s(num_outputs: int, repeats: int) -> float:
    """Return the processor time of one weighing, of which a step has two at most; steps come between them."""
    deadlines, lengths = TokenDeadlines(), OutputLengths()
    for number in range(200):
        lengths.observe(100 + number)
    deadlines.expect(lengths)
    for room in range(num_outputs):
        params = SamplingParams(max_tokens=2000)
        deadlines.add(new_request(room, np.zeros(100, np.int64), params, slo=SLO), 0.001 * room)
    took_s = 0.0
    for number in range(repeats):
        deadlines.stepped(1)
        begun_s = time.process_time()
        deadlines.lost(SLO.tpot_s * number, 0.05, 0.006, 0.008)
        took_s += time.process_time() - begun_s
    return took_s / repeats


def _served(report: Report, arrivals_s: float) -> None:
    """Time what the steps of a load decide, all in all."""
    took = _Timed()
    for name in ("beside", "apart"):
        took.wrap(StepPace, name)
    outcome = simulate(ADAPTIVE, Load(4000, 500, 8.0).calls(arrivals_s))
    took.unwrap()
    mean_s = took.seconds / outcome.num_steps
    case = f"served, {outcome.num_steps} steps, {took.num_calls} decisions"
    report.row("deciding", case, 1e6 * mean_s, "us a step", 1e6 * STEP_LIMIT_S, "wanted", STEP_LIMIT_S / mean_s)


class _Timed:
    """Methods of classes, timed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_calls = 0
        self._before: list[tuple[type, str, Callable[..., object]]] = []

    def wrap(self, owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def timed(*args: object, **named: object) -> object:
            begun_s = time.process_time()  # others may be busy
            found = plain(*args, **named)
            self.seconds += time.process_time() - begun_s
            self.num_calls += 1
            return found

        self._before.append((owner, name, plain))
        setattr(owner, name, timed)

    def unwrap(self) -> None:
        for owner, name, plain in self._before:
            setattr(owner, name, plain)


def _router(report: Report, num_workers: int, repeats: int) -> None:
    workers = {number: _worker_view(number) for number in range(1, num_workers + 1)}
    candidates = Candidates(workers, {key: tuple(workers) for key in workers})
    request = RequestView(prompt_len=2000, number=0, output_len=300.0, slo=SLO)
    for name in ("pair_cost", "adaptive"):
        took_s = _choice_s(POLICIES[name], candidates, request, max(20, repeats // num_workers))
        case, limit_us = f"router, {num_workers} unified workers, {name}", 1e6 * ROUTER_LIMIT_S
        report.row("deciding", case, 1e6 * took_s, "us a request", limit_us, "wanted", ROUTER_LIMIT_S / took_s)


def _choice_s(policy: Policy, candidates: Candidates, request: RequestView, repeats: int) -> float:
    begun_s = time.process_time()
    for _ in range(repeats):
        policy(candidates, request)
    return (time.process_time() - begun_s) / repeats


def _leaving_s(num_leaving: int, num_tokens: int, repeats: int) -> float:
    """Return the processor time of one look, with outputs of so many tokens."""
    leaving, ids = range(1, num_leaving + 1), range(1, LINKED_WORKERS + 1)
    staying = {number: _worker_view(number) for number in ids if number not in leaving}
    linked = tuple(Pair(old, new) for old in ids for new in staying if old != new)
    outputs = {
        place: RunningOutput(leaving[place % num_leaving], SLO, num_tokens + place, place % 300, 1000)
        for place in range(LEAVING_OUTPUTS)
    }

    def successors(worker_id: int, adapter: str) -> frozenset[int]:
        return frozenset(pair.decode_id for pair in linked if pair.prefill_id == worker_id)

    begun_s = time.process_time()
    for _ in range(repeats):
        departures(staying, outputs, successors, 300.0)
    return (time.process_time() - begun_s) / repeats


def _worker_view(number: int) -> Worker:
    load = WorkerLoad(
        num_requests=8,
        queued_tokens=1000 * (number % 3),
        free_tokens=500_000,
        num_queued=number % 3,
        context_tokens=30_000,
        prompt_budget=1000,
        output_tokens=30_000,
        num_outputs=8,
        output_step_s=0.006,
        context_token_s=3.4e-8,
        prompt_token_s=25e-6,
        outputs=((SLO, 8),),
    )
    return Worker(number, load, learned=UNKNOWN, token_bytes=131_072)


if __name__ == "__main__":
    main()
