"""How fast a platform is simulated: seconds of a core, and how many times as fast as it would be in truth.

- *conversation*: Mooncake's conversation trace on eight unified workers, as stamped, by each policy that is named.
  Where the trace is not there, as many generated chats at its rate.
- *roles*: the same on four prefill and four decode workers.
- *traces*: what it takes to generate 10,000 calls, to save them and to read them again.

The limit of a simulation is 500 times real time: a fleet's hour in seven seconds. Decisions are the same in each run,
so a digest says whether two versions differ in anything but speed. Time is that of the processor: others may be busy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from report import Report, arguments

from diptych.cli.plans.simulation import workers_of
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, WorkerSetup
from diptych.simulator.traces import mooncake
from diptych.simulator.traces.call import Call
from diptych.simulator.traces.generators.named import GENERATORS, generate

TRACE: Final = Path(__file__).parents[2] / "shared/data/traces/mooncake_conversation_trace.jsonl"
NUM_CALLS: Final = 12_031
RATE: Final = 3.4  # of the trace
QUICK_CALLS: Final = 200
TIMES: Final = 500.0  # real time
FLEETS: Final = {"conversation": ("unified=8",), "roles": ("prefill=4", "decode=4")}
NUM_GENERATED: Final = 10_000
TRACE_S: Final = 1.0


def main() -> None:
    args = _arguments()
    num_calls = QUICK_CALLS if args.quick else args.calls
    with Report(as_json=args.json) as report:
        calls = _calls(args.trace)[:num_calls]
        for name, fleet in FLEETS.items():
            for policy in args.policies:
                _simulated(report, f"{name}, {policy}, {len(calls)} calls", fleet, policy, calls)
        for name in GENERATORS:
            _trace(report, name)


def _simulated(report: Report, case: str, fleet: Sequence[str], policy: str, calls: Sequence[Call]) -> None:
    setup = Setup(workers_of(fleet, WorkerSetup()), policy)
    begun_s = time.process_time()
    outcome = simulate(setup, calls)
    took_s = time.process_time() - begun_s
    report.row("simulate", f"{case}, decisions {outcome.decisions_digest[:8]}", took_s, "s")
    times = outcome.virtual_s / took_s
    report.row("simulate", case, times, "x real time", TIMES, "target", times / TIMES)
    report.row("simulate", f"{case}: a step", 1e6 * took_s / max(outcome.num_steps, 1), "us")


def _trace(report: Report, name: str) -> None:
    begun_s = time.process_time()
    calls = generate(name, NUM_GENERATED, RATE, 0)
    made_s = time.process_time() - begun_s
    lines = list(mooncake.write(calls))
    mooncake.read(lines)
    whole_s = time.process_time() - begun_s
    report.row("simulate", f"{name}: {NUM_GENERATED} calls generated", made_s, "s", TRACE_S, "target", TRACE_S / made_s)
    report.row("simulate", f"{name}: generated, saved and read", whole_s, "s")


def _calls(path: Path) -> Sequence[Call]:
    if not path.exists():
        return generate("chat", NUM_CALLS, RATE, 0)
    with path.open(encoding="utf-8") as lines:
        return mooncake.read(lines)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE, help="in Mooncake's format")
    parser.add_argument("--calls", type=int, default=NUM_CALLS, help="of the trace")
    parser.add_argument("--policies", nargs="+", default=["pair_cost"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
