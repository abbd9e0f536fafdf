"""Whether pools that are scaled by our metrics follow their load without swinging: the autoscaler's rules on a model.

No cluster, no clock. Requests come at random, with prompts and outputs whose lengths vary as much as in chats.
`steady`: a load for three workers at full use; `burst`: for 1.2 workers, then for six for twenty minutes, then for
1.2 again. A pod serves 90 s after it was asked for. Each target is shown beside others, and beside a pool that is
never scaled and as large as the scaled one in the mean. Waits are for a prefill worker's first token, or for a
decode worker's pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from report import Report, arguments
from scaling.autoscaler import Autoscaler, Behavior
from scaling.pools import DecodePool, PrefillPool
from scaling.run import Load, Run, outputs, prompts, run

START_S: Final = 90.0
QUIET_S: Final = 3600
BURST_S: Final = 1200
NUM_SECONDS: Final = 9000
HIGHEST: Final = 16
BEHAVIOR: Final = Behavior()
SLOW_DRAIN: Final = replace(BEHAVIOR, down_period_s=120.0)  # of a decode pool
BACKLOG_S: Final = 10.0  # the targets that docs/operations/autoscaling.md names
BUSY: Final = 0.7
KV: Final = 0.8
NEVER: Final = math.inf  # a target that is never reached


def steady(second: int) -> float:
    return 3.0


def burst(second: int) -> float:
    return 6.0 if QUIET_S <= second < QUIET_S + BURST_S else 1.2


def prefill(load: Load, backlog_s: float = BACKLOG_S, busy: float = BUSY, seed: int = 1) -> Run:
    pool = PrefillPool(math.ceil(load(0) / BUSY), START_S, backlog_s, busy)
    return run(pool, prompts(load, seed), Autoscaler(BEHAVIOR, 1, HIGHEST), NUM_SECONDS)


def decode(load: Load, kv: float = KV, seed: int = 1) -> Run:
    pool = DecodePool(math.ceil(load(0) / KV), START_S, kv)
    return run(pool, outputs(load, seed), Autoscaler(SLOW_DRAIN, 1, HIGHEST), NUM_SECONDS)


CASES: Final[Sequence[tuple[str, Callable[[Load], Run]]]] = (
    ("prefill, backlog 10 s and busy 0.7", prefill),
    ("prefill, backlog 1 s and busy 0.7", partial(prefill, backlog_s=1.0)),
    ("prefill, backlog 10 s alone", partial(prefill, busy=NEVER)),
    ("prefill, busy 0.7 alone", partial(prefill, backlog_s=NEVER)),
    ("decode, KV demand 0.8", decode),
    ("decode, KV demand 0.7", partial(decode, kv=0.7)),
)


def unscaled(name: str, load: Load, size: int) -> Run:
    """Run a pool that keeps its size."""
    if name.startswith("decode"):
        return run(DecodePool(size, 0.0, KV), outputs(load, 1), None, NUM_SECONDS)
    return run(PrefillPool(size, 0.0, NEVER, BUSY), prompts(load, 1), None, NUM_SECONDS)


def main() -> None:
    """Print three rows a case."""
    args = arguments(__doc__).parse_args()
    with Report(as_json=args.json) as report:
        for load in (burst,) if args.quick else (steady, burst):
            for name, scaled in CASES:
                _report(report, f"{load.__name__}/{name}", scaled(load), partial(unscaled, name, load))


def _report(report: Report, case: str, found: Run, unscaled: Callable[[int], Run]) -> None:
    size = sum(found.sizes) / len(found.sizes)
    limit_s = unscaled(math.ceil(size)).wait_s(0.9)
    ratio = limit_s / found.wait_s(0.9) if found.wait_s(0.9) else 1.0
    report.row("autoscaling", f"{case}/turns", found.num_turns, "turns")
    report.row("autoscaling", f"{case}/size", size, "workers, mean")
    report.row(
        "autoscaling", f"{case}/wait p90", found.wait_s(0.9), "s", limit_s, "always the mean size, rounded up", ratio
    )


if __name__ == "__main__":
    main()
