"""What the router adds to a request: requests/s, latency over a direct call, CPU time a request and a paced token, RSS.

A real router and a real bootstrap; two prefill and two decode workers are simulated in two processes and speak the real
protocol (`router_rig`). They take no time, so everything that is measured is the router's; only in the paced case a
token takes 10 ms. The load generator is another process. CPU time is that of the router's processes alone, read at both
ends of the window: the one number here that neighbours on a shared machine hardly change.

The limit of a latency is the same pair of legs over gRPC without a router. Peers were measured on a machine like this
one, with prefill and decode apart and cache-aware routing: see `results/router.md`.

    python bench/router.py [--quick] [--json] [--workers N] [--only WORD]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import report
from router_rig.load import NUMBER, Tally
from router_rig.platform import Cast, Platform, percentile, platform

BENCH: Final = "router"
NUM_TOKENS: Final = 100
STEP_S: Final = 0.01
QUESTION: Final = f"Question {NUMBER}: what does a router between clients and workers do, and what must it never do?"
PROMPT_LEN: Final = 40  # tokens of the question, for the direct call
PEERS: Final[Mapping[str, Mapping[str, float]]] = {  # requests/s
    "chat/1": {"smg": 1360, "sglang-router": 23, "vllm-router": 450, "mini-lb": 310},
    "chat/32": {"smg": 930, "sglang-router": 890, "vllm-router": 840, "mini-lb": 420},
    "chat/128": {"smg": 760, "sglang-router": 1720, "vllm-router": 870, "dynamo": 280, "mini-lb": 360},
    "one token/64": {"smg": 3360, "sglang-router": 5300, "vllm-router": 2220, "dynamo": 480, "mini-lb": 470},
}
CPU_PEERS: Final[Mapping[str, Mapping[str, float]]] = {  # ms a request
    "chat/1": {"smg": 0.97, "sglang-router": 1.32, "vllm-router": 2.37, "mini-lb": 3.35},
    "chat/32": {"smg": 1.73, "sglang-router": 0.96, "vllm-router": 1.90, "mini-lb": 2.44},
    "chat/128": {"smg": 2.19, "sglang-router": 0.96, "vllm-router": 2.19, "dynamo": 3.68, "mini-lb": 3.06},
    "one token/64": {
        "smg": 0.53,
        "sglang-router": 0.32,
        "vllm-router": 0.85,
        "dynamo": 1.86,
        "mini-lb": 2.23,
    },
}
TOKEN_PEERS: Final = {
    "nginx": 20.9,
    "sglang-router": 33.1,
    "smg": 40.5,
    "vllm-router": 43.7,
    "mini-lb": 95.5,
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked, by how many at once."""

    name: str
    num_tokens: int
    stream: bool
    concurrency: int

    @property
    def body(self) -> Mapping[str, Any]:
        messages = [{"role": "user", "content": QUESTION}]
        return {"messages": messages, "max_tokens": self.num_tokens, "stream": self.stream, "ignore_eos": True}


CASES: Final = (
    Case("chat/1", NUM_TOKENS, True, 1),
    Case("chat/32", NUM_TOKENS, True, 32),
    Case("chat/128", NUM_TOKENS, True, 128),
    Case("one token/64", 1, False, 64),
)
PACED: Final = Case("paced/128", NUM_TOKENS, True, 128)


def measure(running: Platform, case: Case, seconds: float, out: report.Report) -> None:
    direct = running.load_directly(PROMPT_LEN, case.num_tokens, case.concurrency, seconds / 2)
    tally = checked(running.load([case.body], case.concurrency, seconds), case)
    rate, name = tally.requests / tally.seconds, case.name
    out.row(BENCH, name, rate, "requests/s", peers=PEERS[name])
    out.row(BENCH, f"  CPU, {name}", 1e3 * tally.cpu_s / tally.requests, "ms/request", peers=CPU_PEERS[name])
    for share in (0.5, 0.99):
        limit, value = (1e3 * percentile(each.latencies_s, share) for each in (direct, tally))
        words = f"  added latency p{100 * share:.0f}, {name}"
        out.row(BENCH, words, value - limit, "ms", limit, "direct call")


def measure_paced(running: Platform, seconds: float, out: report.Report) -> None:
    """Streams that begin at any time, as those of many people do; as many requests begin in the window as end."""
    spread_s = NUM_TOKENS * STEP_S
    load = running.load([PACED.body], PACED.concurrency, seconds, warm_up_s=2.0, spread_s=spread_s)
    num_tokens = checked(load, PACED).requests * PACED.num_tokens
    out.row(BENCH, PACED.name, num_tokens / load.seconds, "tokens/s", PACED.concurrency / STEP_S, "what is paced")
    out.row(BENCH, f"  CPU, {PACED.name}", 1e6 * load.cpu_s / num_tokens, "us/token", peers=TOKEN_PEERS)
    out.row(BENCH, f"  first byte p50, {PACED.name}", 1e3 * percentile(load.first_byte_s, 0.5), "ms")
    late_s = percentile(load.latencies_s, 0.5) - (PACED.num_tokens - 1) * STEP_S
    out.row(BENCH, f"  end late p50, {PACED.name}", 1e3 * late_s, "ms")


def measure_memory(running: Platform, num_prompts: int, out: report.Report) -> None:
    """What stays of prompts that never come again."""
    case, before = CASES[-1], running.rss_bytes()
    load = running.load([case.body], case.concurrency, 600.0, warm_up_s=0.0, max_requests=num_prompts)
    words = f"RSS after {checked(load, case).requests} distinct prompts"
    out.row(BENCH, words, running.rss_bytes() / 2**20, "MiB", before / 2**20, "before them")


def checked(tally: Tally, case: Case) -> Tally:
    if tally.failures or not tally.requests:
        raise SystemExit(f"{case.name}: {tally.failures} of {tally.requests} failed: {tally.first_failure!r}")
    return tally


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--workers", type=int, default=1, help="processes of the router")
    parser.add_argument("--seconds", type=float, default=4.0, help="a case")
    parser.add_argument("--only", default="", help="cases with this word in their name")
    options = parser.parse_args()
    seconds = 2.0 if options.quick else options.seconds
    router_options = {"workers": options.workers} if options.workers > 1 else {}
    cases = [case for case in CASES if options.only in case.name]
    with report.Report(as_json=options.json) as out:
        if cases:
            with platform(Cast(router_options=router_options)) as running:
                for case in cases:
                    measure(running, case, seconds, out)
                if not options.only:
                    measure_memory(running, 2_000 if options.quick else 100_000, out)
        if options.only in PACED.name:
            with platform(Cast(step_s=STEP_S, router_options=router_options)) as running:
                measure_paced(running, seconds, out)


if __name__ == "__main__":
    main()
