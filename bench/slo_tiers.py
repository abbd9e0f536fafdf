"""Who is served in time when two kinds of requests that can wait come beside one that can't.

The platform of `router_overload`, which serves 25 requests/s: 8/s are of a tier that wants its first token within a
second and is not sheddable, and twice what can be done comes of two that can wait. Once these are sheddable, and once
nobody is.

    python bench/slo_tiers.py [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import report
from router_overload import BODY, NUM_PAIRS, PROMPT_LEN, SERVICE_S
from router_rig.load import NUMBER
from router_rig.open_loop import Fates
from router_rig.platform import Cast, Platform, platform

BENCH: Final = "slo_tiers"
RATES: Final = {"chat": 8.0, "flex": 10.0, "batch": 40.0}  # requests/s
TTFTS_S: Final = {"chat": 1.0, "flex": 5.0, "batch": 60.0}
TIERS: Final = "chat:ttft_ms=1000:weight=4,flex:ttft_ms=5000:weight=0.5{0},batch:ttft_ms=60000:weight=0.1{0}"
WARM_UP: Final = (10.0, 2.0)  # requests/s, for so many seconds: speeds are known then


def measure(running: Platform, seconds: float) -> Mapping[str, Fates]:
    """Have all tiers ask at once."""
    number = int(NUMBER)
    running.arrivals(BODY, *WARM_UP, first_number=number)
    with ThreadPoolExecutor(len(RATES)) as pool:
        asking = {
            tier: pool.submit(
                running.arrivals,
                BODY,
                rate,
                seconds,
                headers={"x-diptych-slo": tier},
                first_number=number + 1_000_000 * index,
            )
            for index, (tier, rate) in enumerate(RATES.items(), 1)
        }
        return {tier: asked.result() for tier, asked in asking.items()}


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    seconds = 5.0 if options.quick else 15.0
    with report.Report(as_json=options.json) as out:
        for words, flag in (("sheddable", ":sheddable"), ("nobody is sheddable", "")):
            tiers = {"slo-tiers": TIERS.format(flag)}
            cast = Cast(num_pairs=NUM_PAIRS, prefill_s_per_token=SERVICE_S / PROMPT_LEN, router_options=tiers)
            with platform(cast) as running:
                found = measure(running, seconds)
            for tier, fates in found.items():
                if fates.failures:
                    raise SystemExit(f"{tier}: failed: {fates.failures[:3]}")
                in_time, offered = fates.num_within(TTFTS_S[tier]), fates.num_offered
                out.row(BENCH, f"{tier} in time, {words}", in_time, "requests", offered, "offered", in_time / offered)
                out.row(BENCH, "  shed", len(fates.refused_s), "requests", offered, "offered")


if __name__ == "__main__":
    main()
