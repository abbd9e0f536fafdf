"""Rows of whole engines: ours, its limit, and the peer's beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from engine_cases import Figures, Ready
from llama_8b import decode_limit_s
from model_cost import prefill_flops
from report import Report
from roofline import Roofline

from diptych.architectures.config import ModelConfig

OURS, PEER, PEER_AT_OURS = "diptych", "vLLM", "vLLM with our sizes"
BENCH: Final = "gpu/engines"
LATENCIES: Final = {
    "TTFT p50": "ttft_p50_s",
    "TTFT p99": "ttft_p99_s",
    "gap p50": "gap_p50_s",
    "gap p99": "gap_p99_s",
}


@dataclass(slots=True)
class Found:
    """What is known of one way to run the model (its weights, its route), by side."""

    way: str
    weight_nbytes: float = 2
    ready_s: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, Ready] = field(default_factory=dict)
    figures: dict[str, dict[str, Figures]] = field(default_factory=dict)  # by case

    def add(self, side: str, case: str, figures: Figures) -> None:
        self.figures.setdefault(case, {})[side] = figures


@dataclass(frozen=True, slots=True)
class Scale:
    """What rows are held against: `limits` is None where no GPU was measured."""

    config: ModelConfig
    limits: Roofline | None
    decode: Mapping[str, tuple[int, int]]  # requests and context of decode cases, by name
    prompts: Mapping[str, int]  # tokens of each prompt, by name


def add_to_report(report: Report, found: Found, scale: Scale) -> None:
    """Add a row for each figure that our side has."""
    if OURS in found.ready_s:
        sizes = ", ".join(f"{side} {each.step_tokens}/{each.requests}" for side, each in found.sizes.items())
        _row(report, f"{found.way}: start until ready" + (f" ({sizes})" if sizes else ""), found.ready_s, "s")
    for case, sides in found.figures.items():
        if OURS in sides:
            _add_case(report, found, case, sides, scale)


def _add_case(report: Report, found: Found, case: str, sides: Mapping[str, Figures], scale: Scale) -> None:
    name = f"{found.way}: {case}"
    if case in scale.decode:
        steps = {side: 1e3 * each.step_s for side, each in sides.items()}
        _row(report, name, steps, "ms", _decode_limit_ms(scale, case, found.weight_nbytes), "bytes at copy speed")
    elif case in scale.prompts:
        rates = {side: each.prompt_tokens_per_s for side, each in sides.items()}
        limit = _prompt_limit(scale, case) if found.weight_nbytes == 2 else None
        _row(report, name, rates, "tokens/s", limit, "bf16 product")
    else:
        _row(report, name, {side: each.output_tokens_per_s for side, each in sides.items()}, "tokens/s")
        for what, field_name in LATENCIES.items():
            values = {side: 1e3 * getattr(each, field_name) for side, each in sides.items()}
            _row(report, f"  {what}, {name}", values, "ms")


def _row(
    report: Report, case: str, values: Mapping[str, float], unit: str, limit: float | None = None, limit_is: str = ""
) -> None:
    """Add ours, with the others beside and how far we are ahead of each: above 1, we are."""
    ours, higher_is_better = values[OURS], unit == "tokens/s"
    peers: dict[str, float] = {}
    for side, value in values.items():
        if side != OURS:
            peers |= {side: value, f"ahead of {side}": ours / value if higher_is_better else value / ours}
    ratio = None if limit is None else (ours / limit if higher_is_better else limit / ours)
    report.row(BENCH, case, ours, unit, limit, limit_is, ratio, peers)


def _decode_limit_ms(scale: Scale, case: str, weight_nbytes: float) -> float | None:
    if scale.limits is None:
        return None
    return 1e3 * decode_limit_s(scale.limits, scale.config, *scale.decode[case], weight_nbytes=weight_nbytes)


def _prompt_limit(scale: Scale, case: str) -> float | None:
    if scale.limits is None:
        return None
    num_tokens = scale.prompts[case]
    return num_tokens * scale.limits.bf16_flops_s / prefill_flops(scale.config, num_tokens)
