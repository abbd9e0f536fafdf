"""What it is worth to agents that their KV is kept while their tools run: job completion against plain LRU.

    python bench/agents.py [--calls 300] [--rate 0.6] [--pressure 2] [--slower 4] [--share 0.9]

Simulates a prefill and a decode worker in virtual time (`diptych.simulator`) that serve coding agents in a closed loop:
each call comes a while after the one before it in its session has been answered. With as much memory as there is
context, it is first measured how much of it is alive in the mean; the pools then hold that divided by `--pressure`.
`--slower`: prompts take so many times as long as those of Llama-3-8B on an H200, as those of larger models do. A job
ends with the last of its calls. `told`: the gap behind each call is known, as the tool's name says it, to a factor of
1.4; the rule is the same, so this is what better guesses could bring. `pulled`: workers pull from each other, history
before a session returns. `line`: clients open a session before its first call, say how much context it will come to
(`longest`: as much as any), and wait in the router's line; a job's time includes that, and so do TTFTs. Nothing in it
depends on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from diptych.common.members.roles import Role
from diptych.engine.cache.return_times import bucket_of
from diptych.engine.values.step_model import H200_LLAMA_8B
from diptych.engine.values.transfer_rules import TransferRules
from diptych.simulator.outcome import Outcome
from diptych.simulator.run import simulate
from diptych.simulator.setup import TRANSFER, Expectation, Setup, WorkerSetup
from diptych.simulator.traces.call import Call
from diptych.simulator.traces.closed_loop import closed_loop
from diptych.simulator.traces.generators.named import generate

PAGE: Final = 512  # tokens: large, so that a run is short
AMPLE: Final = 6000  # pages
COLUMNS: Final = (
    "memory",
    "kept",
    "job mean s",
    "of LRU",
    "p50",
    "p90",
    "hit rate",
    "TTFT mean s",
    "p90",
    "longest s",
    "virtual s",
)


class Jobs(NamedTuple):
    """What became of the sessions of a run."""

    seconds: np.ndarray[tuple[int], np.dtype[np.float64]]  # from the first call to the end of the last
    alive_tokens: float  # of context, in the mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", default="coding_agents")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rate", type=float, default=0.6)
    parser.add_argument("--pressure", type=float, default=2.0)
    parser.add_argument("--slower", type=float, default=4.0)
    parser.add_argument("--share", type=float, nargs="*", default=[0.5, 0.9])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    calls = closed_loop(generate(args.trace, args.calls, args.rate, args.seed))
    ample = run(calls, AMPLE, 0.0, args.slower)
    num_pages = int(jobs_of(calls, ample).alive_tokens / args.pressure / PAGE)
    print(f"{len({call.session for call in calls})} jobs; pools of {num_pages * PAGE:,} tokens\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    lru = run(calls, num_pages, 0.0, args.slower)
    least = jobs_of(calls, lru).seconds.mean()
    print(row("ample", "-", calls, ample, least))
    print(row(f"1/{args.pressure:g}", "LRU", calls, lru, least), flush=True)
    for share in args.share:
        print(row(f"1/{args.pressure:g}", f"{share:g}", calls, run(calls, num_pages, share, args.slower), least))
    share, known = max(args.share, default=0.0), told(calls)
    print(row(f"1/{args.pressure:g}", f"{share:g}, told", known, run(known, num_pages, share, args.slower), least))
    pulled = run(calls, num_pages, share, args.slower, replace(TRANSFER, pulls=True))
    print(row(f"1/{args.pressure:g}", f"{share:g}, pulled", calls, pulled, least), flush=True)
    for words, expectation in (("line", Expectation.EXACT), ("line, longest", Expectation.LONGEST)):
        lined = run(calls, num_pages, share, args.slower, sessions=expectation)
        print(row(f"1/{args.pressure:g}", f"{share:g}, {words}", calls, lined, least), flush=True)


def told(calls: Sequence[Call]) -> list[Call]:
    """Return calls whose tools are named by how long they take."""
    made, before = list(calls), dict[str, int]()
    for number, call in enumerate(calls):
        if call.session in before:
            last = before[call.session]
            made[last] = replace(made[last], tool=f"back in {bucket_of(call.gap_s)}")
        before[call.session] = number
    return made


def run(
    calls: Sequence[Call],
    num_pages: int,
    pin_share: float,
    slower: float,
    transfer: TransferRules = TRANSFER,
    sessions: Expectation = Expectation.NONE,
) -> Outcome:
    model = replace(
        H200_LLAMA_8B,
        prompt_token=slower * H200_LLAMA_8B.prompt_token,
        prompt_pair=slower * H200_LLAMA_8B.prompt_pair,
    )
    worker = WorkerSetup(num_pages=num_pages, page_size=PAGE, pin_share=pin_share, step_model=model)
    longest = max(call.prompt_len + call.output_len for call in calls)
    workers = tuple(replace(worker, role=role) for role in (Role.PREFILL, Role.DECODE))
    return simulate(Setup(workers, context_len=longest, transfer=transfer, sessions=sessions), calls)


def jobs_of(calls: Sequence[Call], outcome: Outcome) -> Jobs:
    """Return the times of all sessions, and how many tokens of context they had between their ends and beginnings."""
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    longest: dict[str, int] = {}
    for number, call in enumerate(calls):
        begun.setdefault(call.session, float(outcome.arrival_s[number]))
        ended[call.session] = max(ended.get(call.session, 0.0), float(outcome.last_s[number]))
        longest[call.session] = max(longest.get(call.session, 0), call.prompt_len + call.output_len)
    seconds = np.array([ended[session] - begun[session] for session in begun])
    return Jobs(seconds, float(seconds @ np.array(list(longest.values()))) / outcome.virtual_s)


def row(memory: str, kept: str, calls: Sequence[Call], outcome: Outcome, lru_s: float) -> str:
    if failed := sum(map(bool, outcome.failure)):
        print(f"{failed} calls failed")
    seconds, ttft_s = jobs_of(calls, outcome).seconds, outcome.ttft_s
    cells = (
        *(memory, kept, f"{seconds.mean():.0f}", f"{seconds.mean() / lru_s:.2f}"),
        *(f"{np.quantile(seconds, share):.0f}" for share in (0.5, 0.9)),
        f"{outcome.cached_len.sum() / outcome.prompt_len.sum():.3f}",
        *(f"{ttft_s.mean():.2f}", f"{np.quantile(ttft_s, 0.9):.2f}", f"{ttft_s.max():.0f}", f"{outcome.virtual_s:.0f}"),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
