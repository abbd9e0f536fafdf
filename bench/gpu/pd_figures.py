"""What is told of each platform that `pd.py` asked: latencies, goodput, and where the time of a hand-off goes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import roofline
from model_cost import layer_weights, output_weights, prefill_flops
from pd_load import Served, Workload
from report import Report
from router_rig.platform import percentile

from diptych.architectures.config import ModelConfig

TTFTS_S: Final = (0.3, 1.0, 5.0)
TPOTS_S: Final = (0.010, 0.025, 0.050)
ITL_RATIO: Final = 1.3  # p99 / p50 that is wanted of decode under prefill load
ADDED_SHARE: Final = 0.02  # of TTFT, that the hand-off may add
ADDED: Final = "prefill_added_ttft_us"
STAGES: Final = {  # of a request, in the order in which they happen
    "decode_queue_us": "pages granted after",
    "prefill_queue_us": "prompt waits",
    "prefill_compute_us": "prompt computed in",
    ADDED: "hand-off after the first token",
    "decode_verify_us": "verified in",
    "decode_join_us": "first token of decode after",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request takes at least, in seconds."""

    ttft_s: float
    itl_s: float


def limits_of(config: ModelConfig, workload: Workload) -> Limits | None:
    limits = roofline.recorded()
    if limits is None:
        return None
    ttft_s = prefill_flops(config, workload.prompt_len) / limits.bf16_flops_s
    return Limits(ttft_s, 2 * (layer_weights(config) + output_weights(config)) / limits.copy_bytes_s)


def figures(served: Sequence[Served], seconds: float) -> dict[str, float]:
    """Return what is compared, by its name in the table."""
    gaps = [gap for each in served for gap in each.gaps_s]
    ttfts = [each.ttft_s for each in served]
    found = {
        "TTFT p50, ms": 1e3 * percentile(ttfts, 0.5),
        "TTFT p99, ms": 1e3 * percentile(ttfts, 0.99),
        "ITL p50, ms": 1e3 * percentile(gaps, 0.5),
        "ITL p99, ms": 1e3 * percentile(gaps, 0.99),
        "output, tokens/s": sum(each.num_tokens for each in served) / seconds,
    }
    for ttft_s in TTFTS_S:
        for tpot_s in TPOTS_S:
            met = sum(each.ttft_s <= ttft_s and each.tpot_s <= tpot_s for each in served)
            found[f"goodput {ttft_s:g} s, {1e3 * tpot_s:g} ms, requests/s"] = met / seconds
    return found


def add_to_report(
    report: Report,
    case: str,
    mine: Mapping[str, float],
    others: Mapping[str, Mapping[str, float]],
    rate: float,
    limits: Limits | None,
) -> None:
    """A row for each figure, with those of the platforms that were measured before beside it."""
    for what, value in mine.items():
        name, _, unit = what.rpartition(", ")
        peers = {other: theirs[what] for other, theirs in others.items()}
        if name.startswith("goodput"):
            report.row("gpu/pd", f"{case} {name}", value, unit, rate, "asked for", value / rate, peers)
        elif limits and name.startswith(("TTFT", "ITL")) and value:
            limit = 1e3 * (limits.ttft_s if name.startswith("TTFT") else limits.itl_s)
            words = "arithmetic" if name.startswith("TTFT") else "reading the weights"
            report.row("gpu/pd", f"{case} {name}", value, unit, limit, words, limit / value, peers)
        else:
            report.row("gpu/pd", f"{case} {name}", value, unit, peers=peers)


def add_hand_off(report: Report, case: str, served: Sequence[Served]) -> None:
    """Where the time of a hand-off goes, what it moved, and how evenly decode makes its own tokens."""
    gaps = [gap for each in served for gap in each.gaps_s[1:]]
    spread = percentile(gaps, 0.99) / percentile(gaps, 0.5)
    report.row("gpu/pd", f"{case} ITL p99/p50 of decode", spread, "x", ITL_RATIO, "wanted", ITL_RATIO / spread)
    limit = 1e3 * ADDED_SHARE * statistics.median(each.ttft_s for each in served)
    for stage, words in STAGES.items():
        known = [each.timings[stage] for each in served if stage in each.timings]
        value = statistics.median(known or [0]) / 1e3
        if stage == ADDED and value:
            report.row("gpu/pd", f"{case} {words}", value, "ms", limit, "2 % of TTFT", limit / value)
        else:
            report.row("gpu/pd", f"{case} {words}", value, "ms")
    second = 1e3 * statistics.median(each.gaps_s[0] for each in served if each.gaps_s)
    report.row("gpu/pd", f"{case} second token after the first", second, "ms")
    moved = statistics.median(each.timings.get("bytes_moved", 0) for each in served)
    report.row("gpu/pd", f"{case} KV moved a request", moved / 2**20, "MiB")
