"""How calls were served, as their client saw it, and what that comes to. Pure.

Shares and percentiles of times to the first token count every call that was offered: one that failed was never served
well, and took for ever. A server that refuses half of its calls does not look quicker for it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from diptych.common.arrays import F64
from diptych.generation.slo import Slo

MAX_REASONS: Final = 5
LATE_S: Final = 0.05  # a client that sends so much later than it should measures itself


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """One call. Times in seconds since the load began."""

    due_s: float
    sent_s: float
    stamps_s: tuple[float, ...] = ()  # of events with text
    prompt_tokens: int = 0  # as the server counts them; 0: it does not say
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""  # why it failed
    ended_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return not self.error and bool(self.stamps_s)

    @property
    def ttft_s(self) -> float:
        return self.stamps_s[0] - self.sent_s if self.is_good else math.inf

    @property
    def tpot_s(self) -> float:
        """Mean time of each token after the first; nan: there was none."""
        if not self.is_good:
            return math.inf
        return (self.stamps_s[-1] - self.stamps_s[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    @property
    def gaps_s(self) -> Iterator[float]:
        return (after - before for before, after in itertools.pairwise(self.stamps_s))

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s if self.is_good else math.inf

    def keeps(self, slo: Slo) -> bool:
        """Whether it was served within its objectives; a time of 0 is none."""
        ttft_kept = not slo.ttft_s or self.ttft_s <= slo.ttft_s
        return self.is_good and ttft_kept and (not slo.tpot_s or not self.tpot_s > slo.tpot_s)


class Times(NamedTuple):
    """Percentiles and the mean, in seconds; the mean is of those that are finite."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Result:
    """What became of all calls together."""

    offered: int
    served: int
    good: int  # that kept their objectives
    duration_s: float  # from the first call sent to the last one ended
    requests_per_s: float  # served
    goodput_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    most_in_flight: int
    ttft_s: Times
    tpot_s: Times
    itl_s: Times  # between events with text
    e2e_s: Times
    late_s: float  # p99 of how much later calls were sent than they were due
    failures: tuple[tuple[str, int], ...]  # the most frequent first


def result_of(calls: Sequence[Served], slo: Slo) -> Result:
    """Sum it up."""
    served = [call for call in calls if call.is_good]
    began_s = min((call.sent_s for call in calls), default=0.0)
    duration_s = max(1e-9, max((call.ended_s for call in calls), default=0.0) - began_s)
    good, output = sum(call.keeps(slo) for call in calls), sum(call.output_tokens for call in served)
    prompt = sum(call.prompt_tokens for call in served)
    return Result(
        offered=len(calls),
        served=len(served),
        good=good,
        duration_s=duration_s,
        requests_per_s=len(served) / duration_s,
        goodput_per_s=good / duration_s,
        prompt_tokens=prompt,
        cached_tokens=sum(call.cached_tokens for call in served),
        output_tokens=output,
        output_tokens_per_s=output / duration_s,
        total_tokens_per_s=(prompt + output) / duration_s,
        most_in_flight=int(max(in_flight(calls)[1], default=0)),
        ttft_s=times_of(call.ttft_s for call in calls),
        tpot_s=times_of(call.tpot_s for call in calls),
        itl_s=times_of(gap for call in served for gap in call.gaps_s),
        e2e_s=times_of(call.e2e_s for call in calls),
        late_s=times_of(max(0.0, call.sent_s - call.due_s) for call in calls).p99,
        failures=tuple(Counter(call.error for call in calls if call.error).most_common(MAX_REASONS)),
    )


def times_of(values: Iterator[float]) -> Times:
    """Return percentiles, without what is nan."""
    known = np.array([value for value in values if not math.isnan(value)])
    if not len(known):
        return Times(*[math.nan] * 4)
    finite = known[np.isfinite(known)]
    mean = float(finite.mean()) if len(finite) else math.inf
    return Times(mean, *np.percentile(known, (50, 90, 99), method="inverted_cdf").tolist())


def in_flight(calls: Sequence[Served]) -> tuple[F64, F64]:
    """Return times, and how many calls were under way from each on."""
    moves = sorted([(call.sent_s, 1) for call in calls] + [(call.ended_s, -1) for call in calls])
    at_s, steps = np.array([at for at, _ in moves]), np.array([step for _, step in moves])
    return at_s, np.cumsum(steps).astype(np.float64)


def table(result: Result, slo: Slo) -> str:
    """Return what is printed."""
    rows = [
        ("calls", f"{result.served} of {result.offered} served in {result.duration_s:.1f} s"),
        ("", f"{result.requests_per_s:.2f} a second, at most {result.most_in_flight} at once"),
        (
            "tokens",
            f"{result.prompt_tokens} of prompts ({result.cached_tokens} cached), {result.output_tokens} of outputs",
        ),
        ("", f"{result.output_tokens_per_s:.1f} of outputs a second, {result.total_tokens_per_s:.1f} of both"),
    ]
    if slo.ttft_s or slo.tpot_s:
        share = result.good / max(1, result.offered)
        rows.append(("goodput", f"{result.goodput_per_s:.2f} calls a second: {share:.1%} within {_words(slo)}"))
    lines = [f"{name:<9}{words}" for name, words in rows]
    lines += ["", f"{'ms':<9}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}"]
    named = (("TTFT", result.ttft_s), ("TPOT", result.tpot_s), ("ITL", result.itl_s), ("E2E", result.e2e_s))
    lines += [f"{name:<9}" + "".join(f"{_shown(1000 * value):>10}" for value in times) for name, times in named]
    lines += [f"failed   {count} x {reason}" for reason, count in result.failures]
    if result.late_s > LATE_S:
        lines.append(
            f"beware   1 % of calls were sent {1000 * result.late_s:.0f} ms late or more: this client is too slow"
        )
    return "\n".join(lines)


def as_json(result: Result, calls: Sequence[Served]) -> Mapping[str, Any]:
    """Return all of it, for programs: what is infinite or not known is null."""
    found = asdict(result) | {"failures": dict(result.failures)}
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        found[name] = {key: _known(value) for key, value in getattr(result, name)._asdict().items()}
    return {**{key: _known(value) for key, value in found.items()}, "calls": [_row(call) for call in calls]}


def _row(call: Served) -> Mapping[str, Any]:
    return {
        "due_s": round(call.due_s, 6),
        "sent_s": round(call.sent_s, 6),
        "ttft_s": _known(call.ttft_s),
        "tpot_s": _known(call.tpot_s),
        "e2e_s": _known(call.e2e_s),
        "prompt_tokens": call.prompt_tokens,
        "output_tokens": call.output_tokens,
        "error": call.error,
    }


def _known(value: Any) -> Any:
    return (round(value, 6) if math.isfinite(value) else None) if isinstance(value, float) else value


def _shown(value: float) -> str:
    return "-" if math.isnan(value) else "never" if math.isinf(value) else f"{value:.1f}"


def _words(slo: Slo) -> str:
    named = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
    return " and ".join(f"{name} {1000 * value:g} ms" for name, value in named if value)
