"""What is left of the platform when more is asked for than it can do: goodput, and how soon a no comes.

A real router before two prefill and two decode workers, simulated in processes of their own (`router_rig`): a prompt
takes 80 ms of a prefill worker's time, one after the other, so two of them serve 25 requests/s. Requests arrive at
random, whatever became of those before. *Goodput*: requests/s whose first token came within a second. With the
limit in their header (`x-diptych-ttft-deadline-ms`) the router refuses at once what would come later; without it
everybody waits for everybody.

    python bench/router_overload.py [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import report
from router_rig.load import NUMBER
from router_rig.open_loop import Fates
from router_rig.platform import Cast, Platform, percentile, platform

BENCH: Final = "router_overload"
NUM_PAIRS: Final = 2
SERVICE_S: Final = 0.08  # of a prefill worker, a request
CAPACITY: Final = NUM_PAIRS / SERVICE_S  # requests/s
SLO_S: Final = 1.0
NUM_TOKENS: Final = 8
DEADLINE: Final = {"x-diptych-ttft-deadline-ms": f"{1000 * SLO_S:g}"}
QUESTION: Final = f"{NUMBER}: " + "What is served when everybody asks at once, and who is told to come back? " * 8
PROMPT_LEN: Final = 178  # tokens of the question in its chat
BODY: Final[Mapping[str, Any]] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": NUM_TOKENS,
    "stream": True,
    "ignore_eos": True,
}
LOADS: Final = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0)  # of what the workers can do
QUICK_LOADS: Final = (0.8, 1.5, 3.0)


def measure(running: Platform, load: float, seconds: float, headers: Mapping[str, str]) -> Fates:
    first_number = int(NUMBER) + round(1e6 * load) + len(headers)  # nobody asks twice: nothing is cached
    fates = running.arrivals(BODY, load * CAPACITY, seconds, headers=headers, first_number=first_number)
    if fates.failures or fates.num_without_retry_after:
        raise SystemExit(f"{load}: failed: {fates.failures[:3]}, no Retry-After: {fates.num_without_retry_after}")
    return fates


def add_to_report(out: report.Report, load: float, fates: Fates, seconds: float, words: str) -> float:
    goodput = fates.num_within(SLO_S) / seconds
    limit = min(fates.num_offered / seconds, CAPACITY)
    out.row(BENCH, f"goodput at {load:g} x, {words}", goodput, "requests/s", limit, "what can be done", goodput / limit)
    for share in (0.5, 0.99) if fates.refused_s else ():
        refused_ms = 1e3 * percentile(fates.refused_s, share)
        out.row(BENCH, f"  a no at {load:g} x, p{100 * share:.0f}", refused_ms, "ms", 50, "wanted")
    return goodput


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    loads, seconds = (QUICK_LOADS, 4.0) if options.quick else (LOADS, 10.0)
    cast = Cast(num_pairs=NUM_PAIRS, prefill_s_per_token=SERVICE_S / PROMPT_LEN)
    with report.Report(as_json=options.json) as out, platform(cast) as running:
        goodputs = {
            load: add_to_report(out, load, measure(running, load, seconds, DEADLINE), seconds, "with a limit")
            for load in loads
        }
        past = [goodput for load, goodput in goodputs.items() if load >= 1.5]
        best = max(goodputs.values())
        out.row(BENCH, "least goodput past saturation", min(past), "requests/s", best, "the best", min(past) / best)
        worst = measure(running, loads[-1], seconds, {})
        add_to_report(out, loads[-1], worst, seconds, "without")


if __name__ == "__main__":
    main()
