"""Summaries beside each other: as a table for people, and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from diptych.simulator.report.errors import HIT_RATE, Error, Typical
from diptych.simulator.report.summary import Percentiles, Summary

GAP: Final = "  "
MS: Final = 1000.0
NO_TIER: Final = "no tier"
Rows: TypeAlias = Sequence[tuple[str, Callable[[Summary], str]]]
ROWS: Final[Rows] = (
    ("offered", lambda of: f"{of.offered}"),
    ("offered /s", lambda of: _number(of.offered_per_s)),
    ("served", lambda of: f"{of.served}"),
    ("kept their SLO", lambda of: f"{of.good}"),
    ("of offered", lambda of: _share(of.attainment)),
    ("  TTFT alone", lambda of: _share(of.ttft_attainment)),
    ("  TPOT alone", lambda of: _share(of.tpot_attainment)),
    ("holds 90 % / 99 %", lambda of: f"{_word(of.holds_90)} / {_word(of.holds_99)}"),
    ("goodput /s", lambda of: _number(of.goodput_per_s)),
    ("goodput / GPU-hour", lambda of: _number(of.good_per_gpu_hour)),
    ("GPU-hours", lambda of: _number(of.gpu_hours)),
    ("TTFT ms p50/90/99", lambda of: _times(of.ttft_s)),
    ("TPOT ms p50/90/99", lambda of: _times(of.tpot_s)),
    ("E2E s p50/90/99", lambda of: _times(of.e2e_s, 1.0)),
    ("hit rate", lambda of: _share(of.hit_rate)),
    ("role changes", lambda of: f"{of.flips}"),
    ("KV moved GB", lambda of: _number(of.moved_gb)),
    ("steps", lambda of: f"{of.steps}"),
    ("virtual s", lambda of: _number(of.virtual_s)),
    ("decisions", lambda of: of.decisions_digest[:16]),
)
TIER_ROWS: Final[Rows] = (
    ("kept their SLO", lambda of: f"{of.good} of {of.offered}"),
    ("TTFT ms p50/90/99", lambda of: _times(of.ttft_s)),
    ("TPOT ms p50/90/99", lambda of: _times(of.tpot_s)),
)
TIER_FIELDS: Final = frozenset({"offered", "served", "good", "attainment", "ttft_s", "tpot_s", "e2e_s", "failures"})


class Result(NamedTuple):
    """What came of all calls, and of those of each tier, where there are several."""

    whole: Summary
    tiers: Mapping[str, Summary] = MappingProxyType({})


def table(results: Mapping[str, Result]) -> str:
    """Return aligned lines, one column for each result; then why calls failed, where any did."""
    wholes = {name: result.whole for name, result in results.items()}
    lines = [["", *results], *_rows(ROWS, wholes, "")]
    for tier in dict.fromkeys(tier for result in results.values() for tier in result.tiers):
        lines += _rows(
            TIER_ROWS, {name: result.tiers[tier] for name, result in results.items()}, f"{tier or NO_TIER}: "
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [GAP.join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:]))) for line in lines]
    return "\n".join((*shown, *_failures(wholes)))


def error_table(found: Sequence[Error], calls: Sequence[Typical]) -> str:
    """Return aligned lines: what was measured, what was simulated, and by how much that is off."""
    lines = [["", "measured", "simulated", "error"], *map(_error_line, found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [GAP.join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:]))) for line in lines]
    words = (f"{name}: half of the calls within {_share(p50)}, 90 % within {_share(p90)}" for name, p50, p90 in calls)
    return "\n".join((*shown, *words))


def as_json(results: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
    """Return the same as plain values. JSON has no infinity: what never came is null."""
    return {
        name: {**_fields(whole), "tiers": {tier: _fields(each, TIER_FIELDS) for tier, each in tiers.items()}}
        for name, (whole, tiers) in results.items()
    }


def _error_line(of: Error) -> list[str]:
    if of.name == HIT_RATE:
        points = 100 * (of.simulated - of.measured)
        return [of.name, _share(of.measured), _share(of.simulated), f"{points:+.1f} points"]
    times = (f"{_number(MS * value)} ms" for value in (of.measured, of.simulated))
    return [of.name, *times, f"{100 * of.relative:+.1f} %"]


def _rows(rows: Rows, summaries: Mapping[str, Summary], prefix: str) -> list[list[str]]:
    return [[prefix + title, *map(cell, summaries.values())] for title, cell in rows]


def _fields(of: Summary, names: Collection[str] = ()) -> dict[str, Any]:
    return {name: _plain(value) for name, value in asdict(of).items() if not names or name in names}


def _failures(summaries: Mapping[str, Summary]) -> Iterator[str]:
    for name, each in summaries.items():
        for reason, count in each.failures:
            yield f"{name}: {count} of {each.offered} failed: {reason}"


def _plain(value: Any) -> Any:
    if isinstance(value, Percentiles):
        return {key: _plain(each) for key, each in value._asdict().items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return dict(value)
    return value


def _number(value: float) -> str:
    """Return about four figures."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %" if math.isfinite(value) else "-"


def _word(holds: bool) -> str:
    return "yes" if holds else "no"


def _times(found: Percentiles, unit: float = MS) -> str:
    return "/".join("never" if value == math.inf else _number(unit * value) for value in found)
