"""A simulation in numbers. Every share and percentile counts all calls that were *offered*.

A call that was refused, or never got its last token, kept no objective and took for ever: a platform that serves fewer
does not look quicker for it. What it cost is always among the numbers: GPU-hours, changes of role, KV that was moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from diptych.common.arrays import F64
from diptych.generation.slo import NO_SLO, Slo
from diptych.simulator.outcome import Outcome

BOOL = npt.NDArray[np.bool_]
ATTAINMENTS: Final = (0.9, 0.99)
ARRAYS: Final = (  # of an outcome, with one entry a call
    *("arrival_s", "first_s", "last_s", "prefill_id", "decode_id", "prompt_len", "output_len", "cached_len"),
)


class Percentiles(NamedTuple):
    """Seconds; infinite where so many calls have none, nan where nobody was asked for any."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of all calls together, and what it cost."""

    offered: int  # calls
    served: int  # that got their last token
    good: int  # that kept their objectives
    offered_per_s: float
    goodput_per_s: float  # good calls, over the time until the last call had ended
    attainment: float  # good by offered
    ttft_attainment: float  # likewise of the first token alone
    tpot_attainment: float
    holds_90: bool  # whether so many kept their objectives
    holds_99: bool
    ttft_s: Percentiles
    tpot_s: Percentiles  # of outputs of two tokens or more
    e2e_s: Percentiles
    hit_rate: float  # tokens of prompts found cached, of all tokens of prompts that were computed; nan: none was
    gpu_hours: float
    good_per_gpu_hour: float
    flips: int
    moved_gb: float  # of KV, 10^9 bytes
    steps: int
    virtual_s: float
    failures: tuple[tuple[str, int], ...]  # reasons, the most frequent first
    decisions_digest: str


def summary(outcome: Outcome, slo: Slo, by_call: Sequence[Slo] = ()) -> Summary:
    """Sum a simulation up; `by_call` has the objectives of each call, where they are not the same for all."""
    ttft_kept, tpot_kept = _kept(outcome, by_call or [slo])
    good, offered = int((ttft_kept & tpot_kept).sum()), len(outcome.arrival_s)
    gpu_hours, attainment = outcome.gpu_s / 3600, _ratio(good, offered)
    was_computed = outcome.prefill_id > 0
    has_tpot = outcome.output_len > 1
    return Summary(
        offered=offered,
        served=int(outcome.is_served.sum()),
        good=good,
        offered_per_s=_ratio(offered, float(np.ptp(outcome.arrival_s)) if offered else 0.0),
        goodput_per_s=_ratio(good, outcome.virtual_s),
        attainment=attainment,
        ttft_attainment=_ratio(int(ttft_kept.sum()), offered),
        tpot_attainment=_ratio(int(tpot_kept.sum()), offered),
        holds_90=attainment >= ATTAINMENTS[0],
        holds_99=attainment >= ATTAINMENTS[1],
        ttft_s=_percentiles(np.where(outcome.is_served, outcome.ttft_s, np.nan)),
        tpot_s=_percentiles(outcome.tpot_s[has_tpot]),
        e2e_s=_percentiles(outcome.last_s - outcome.arrival_s),
        hit_rate=_ratio(int(outcome.cached_len[was_computed].sum()), int(outcome.prompt_len[was_computed].sum())),
        gpu_hours=gpu_hours,
        good_per_gpu_hour=_ratio(good, gpu_hours),
        flips=outcome.num_flips,
        moved_gb=outcome.moved_bytes / 1e9,
        steps=outcome.num_steps,
        virtual_s=outcome.virtual_s,
        failures=tuple(Counter(reason for reason in outcome.failure if reason).most_common()),
        decisions_digest=outcome.decisions_digest,
    )


def of_tiers(outcome: Outcome, slos: Sequence[Slo], tiers: Sequence[str]) -> Mapping[str, Summary]:
    """Sum the calls of each tier up by themselves; `slos` and `tiers` have one entry a call.

    What the platform did and took as a whole (GPU-hours, steps, KV that was moved) is not told apart by tiers.
    """
    chosen = {tier: np.array([each == tier for each in tiers]) for tier in sorted(set(tiers))}
    return {
        tier: summary(_only(outcome, which), NO_SLO, [slo for slo, is_it in zip(slos, which, strict=True) if is_it])
        for tier, which in chosen.items()
    }


def _only(outcome: Outcome, chosen: BOOL) -> Outcome:
    arrays = {name: getattr(outcome, name)[chosen] for name in ARRAYS}
    failure = tuple(reason for reason, is_it in zip(outcome.failure, chosen, strict=True) if is_it)
    return replace(outcome, **arrays, failure=failure)


def _kept(outcome: Outcome, slos: Sequence[Slo]) -> tuple[BOOL, BOOL]:
    """Return which calls kept their time to the first token, and which that of each token after it."""
    ttft_slo_s, tpot_slo_s = (np.array([getattr(slo, name) for slo in slos]) for name in ("ttft_s", "tpot_s"))
    served = outcome.is_served
    with np.errstate(invalid="ignore"):  # nan is not less
        ttft_kept: BOOL = served & ((ttft_slo_s <= 0) | (outcome.ttft_s <= ttft_slo_s))
        tpot_kept: BOOL = served & ((tpot_slo_s <= 0) | (outcome.tpot_s <= tpot_slo_s))
    return ttft_kept, tpot_kept


def _percentiles(values: F64) -> Percentiles:
    if not len(values):
        return Percentiles(np.nan, np.nan, np.nan)
    never = np.nan_to_num(values, nan=np.inf)
    return Percentiles(*np.percentile(never, (50, 90, 99), method="inverted_cdf").tolist())


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else np.nan
