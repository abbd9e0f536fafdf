"""Keeps what charts are drawn of: one sample each 5 seconds of the last hour, as differences of the router's counters.

Rule: what is kept are counts, and quantiles come last. Rates of several processes add up; their quantiles do not, but
the counts of their buckets do. What each process sees of the whole fleet is the mean of what they tell.
Intervals begin at multiples of 5 s since 1970, so those of several processes lie on each other. Memory is taken once:
`History.nbytes`, 112 KB. Times are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.router.console.pieces import Pieces
from diptych.router.console.state import ChartCounts, Charts, Series
from diptych.router.values.served import ITL_BOUNDS, TTFT_BOUNDS, Served
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_READY, Instance, WorkerLoad

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

INTERVAL_S: Final = 5.0
NUM_INTERVALS: Final = 720
LATE_INTERVALS: Final = 3  # a process that is later than this has stopped, and the others do not wait for it
SET_BACK_INTERVALS: Final = 12  # a clock that is set back further begins a new hour
BOUNDS: Final[Mapping[str, tuple[float, ...]]] = {"ttft": TTFT_BOUNDS, "itl": ITL_BOUNDS}
QUANTILES: Final = (0.5, 0.95)
ROLES: Final = tuple(role.value for role in WORKER_ROLES.values())
PROMPT_ROLES: Final = tuple(role for role in ROLES if role != Role.DECODE.value)  # those that compute prompts

_COUNTS: Final = ("requests", "errors", "tried", "good", "prompt_tokens", "cached_tokens", "output_tokens")
_NOW: Final = ("queued", "running")
_MEANS: Final = (*(f"kv_{role}" for role in ROLES), *(f"queue_{role}" for role in PROMPT_ROLES))
_RATES: Final[Mapping[str, str]] = {
    "requests": "requests/s",
    "errors": "requests/s",
    "prompt_tokens": "tokens/s",
    "output_tokens": "tokens/s",
}


class Line(Protocol):
    """Who has been admitted, and who waits."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...


class Member(Protocol):
    """A worker."""

    @property
    def record(self) -> Instance: ...

    @property
    def load(self) -> WorkerLoad: ...

    @property
    def backlog_s(self) -> float: ...


class Tokens(NamedTuple):
    """Tokens of the prompts of finished requests."""

    prompt: int
    cached: int


class History:
    """The last hour of one process. `sample` it each 5 s, whether anybody looks or not."""

    def __init__(self, served: Callable[[], Served], line: Line, members: Callable[[], Iterable[Member]]) -> None:
        self._served = served
        self._line = line
        self._members = members
        num_buckets = sum(len(bounds) + 1 for bounds in BOUNDS.values())
        self._counts: F32 = np.zeros((NUM_INTERVALS, len(_COUNTS) + num_buckets), np.float32)  # a ring by number
        self._levels: F32 = np.zeros((NUM_INTERVALS, len(_NOW) + len(_MEANS)), np.float32)
        self._first = 0  # number of the oldest interval, counted from 1970
        self._end = 0  # number after the newest one
        self._before: F64 | None = None  # counts at the last sample

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes + self._levels.nbytes

    @property
    def end(self) -> int:
        """The number after that of the newest interval; intervals are counted from 1970."""
        return self._end

    def pause_s(self, now_s: float) -> float:
        """Return how long it is until the next sample."""
        return INTERVAL_S - now_s % INTERVAL_S

    def sample(self, now_s: float) -> Pieces[None]:
        """Take the interval that ends now, in seconds since 1970. What came late is spread over all that it covers."""
        level = yield from self._level()
        end, counts = round(now_s / INTERVAL_S), _flat(self._served())
        if self._before is None or end < self._end - SET_BACK_INTERVALS:
            self._first, self._end, self._before = end, end, counts
        elif end > self._end:
            num_ended = min(end - self._end, NUM_INTERVALS)
            rows = np.arange(end - num_ended, end) % NUM_INTERVALS
            self._counts[rows] = (counts - self._before) / num_ended
            self._levels[rows] = level
            self._first = max(self._first, end - NUM_INTERVALS)
            self._end, self._before = end, counts

    def counts(self) -> Pieces[ChartCounts]:
        """Return what other processes may add to theirs."""
        rows, begun_s = self._rows(NUM_INTERVALS), self._first * INTERVAL_S
        columns = dict(zip(_COUNTS, self._counts[rows].T, strict=False))
        levels = dict(zip((*_NOW, *_MEANS), self._levels[rows].T, strict=True))
        buckets = self._buckets(rows)
        yield
        return ChartCounts(
            begun_unix_s=begun_s,
            interval_s=INTERVAL_S,
            sums=(yield from _lists({**columns, **_of(levels, _NOW)})),
            means=(yield from _lists({name: each for name, each in _of(levels, _MEANS).items() if _has_any(each)})),
            buckets=(yield from _tables(buckets)),
            bounds={name: list(bounds) for name, bounds in BOUNDS.items()},
        )

    def charts(self) -> Pieces[Charts]:
        """Return the charts of this process alone."""
        counts = yield from self.counts()
        return (yield from charts_of([counts]))

    def tokens(self, window_s: float) -> Tokens:
        """Return the tokens of prompts of the last `window_s`, in whole intervals."""
        recent = self._counts[self._rows(math.ceil(window_s / INTERVAL_S))].sum(0, dtype=np.float64)
        return Tokens(*(round(recent[_COUNTS.index(name)]) for name in ("prompt_tokens", "cached_tokens")))

    def _rows(self, num_intervals: int) -> npt.NDArray[np.int64]:
        return np.arange(max(self._first, self._end - num_intervals), self._end) % NUM_INTERVALS

    def _buckets(self, rows: npt.NDArray[np.int64]) -> dict[str, F32]:
        found, start = {}, len(_COUNTS)
        for name, bounds in BOUNDS.items():
            found[name] = self._counts[rows, start : start + len(bounds) + 1]
            start += len(bounds) + 1
        return found

    def _level(self) -> Pieces[list[float]]:
        pools = yield from _pools(self._members())
        return [self._line.num_waiting, self._line.num_running, *(pools.get(name, np.nan) for name in _MEANS)]


def charts_of(parts: Sequence[ChartCounts]) -> Pieces[Charts]:
    """Return the charts of all processes whose counts are given, at least one: they add up, interval by interval.

    The newest intervals are left out until every process has told them, unless one has stopped. What has other buckets
    than the first, as of another version, is left out.
    """
    parts = [part for part in parts if part["bounds"] == parts[0]["bounds"]]
    first = round(min(part["begun_unix_s"] for part in parts) / INTERVAL_S)
    ends = [round(part["begun_unix_s"] / INTERVAL_S) + _num_intervals(part) for part in parts]
    end = min(each for each in ends if each >= max(ends) - LATE_INTERVALS)
    span = range(max(first, end - NUM_INTERVALS), end)
    sums, series = {}, {}
    for name in (*_COUNTS, *_NOW):
        sums[name] = _sum([_placed(part, part["sums"].get(name), span) for part in parts])
        yield
    for name, unit in _RATES.items():
        series[name] = _series(unit, sums[name] / INTERVAL_S)
        yield
    series |= {name: _series("requests", sums[name]) for name in _NOW}
    with np.errstate(invalid="ignore", divide="ignore"):
        series["goodput"] = _series("share", sums["good"] / sums["tried"])
    yield
    for name, bounds in BOUNDS.items():
        counts = yield from _sum_of_buckets(parts, name, span)
        for q in QUANTILES:
            series[f"{name}_p{q * 100:.0f}"] = _series("s", quantile(q, bounds, counts))
            yield
    for name in sorted({name for part in parts for name in part["means"]}):
        mean = _mean([_placed(part, part["means"].get(name), span) for part in parts])
        series[name] = _series("share" if name.startswith("kv_") else "s", mean)
        yield
    return Charts(begun_unix_s=span.start * INTERVAL_S, interval_s=INTERVAL_S, series=series)


def _sum_of_buckets(parts: Sequence[ChartCounts], name: str, span: range) -> Pieces[F64]:
    placed = []
    for part in parts:
        placed.append(_placed(part, part["buckets"][name], span, len(BOUNDS[name]) + 1))
        yield
    return np.nan_to_num(_sum(placed))


def quantile(q: float, bounds: Sequence[float], counts: F64) -> F64:
    """Return a quantile of each row of `counts` [num_rows, num_bounds + 1], as Prometheus does; NaN of no counts.

    Within a bucket all values are equally likely; beyond the last bound it is that bound.
    """
    upper = np.array([*bounds, bounds[-1]])
    lower = np.array([0.0, *bounds])
    cumulative = counts.cumsum(1)
    rank = q * cumulative[:, -1:]
    bucket = np.minimum((cumulative < rank).sum(1), len(bounds))
    rows = np.arange(len(counts))
    inside = counts[rows, bucket]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (rank[:, 0] - cumulative[rows, bucket] + inside) / inside
    return np.where(cumulative[:, -1] > 0, lower[bucket] + (upper - lower)[bucket] * share, np.nan)


def _flat(served: Served) -> F64:
    """Return the counts in the order of the columns. Tried: what was finished, or failed and should not have."""
    failed = served.errors + served.refused
    tried = served.finished + failed
    counts = (
        served.requests,
        served.errors,
        tried,
        served.good,
        served.prompt_tokens,
        served.cached_tokens,
        served.output_tokens,
    )
    return np.array((*counts, *served.ttft, *served.itl))


def _pools(members: Iterable[Member]) -> Pieces[dict[str, float]]:
    """Return by role the share of pages that requests hold, and the time until a prompt that came now would begin."""
    pools: dict[int, _Pool] = {}
    for member in members:
        record, load = member.record, member.load
        if record.state == INSTANCE_STATE_READY:
            pool = pools.setdefault(record.role, _Pool())
            pool.num_workers += 1
            pool.free_pages += load.free_pages
            pool.total_pages += load.total_pages
            pool.backlog_s += member.backlog_s
        yield
    named = [(WORKER_ROLES[role].value, pool) for role, pool in pools.items()]
    shares = {f"kv_{role}": 1 - pool.free_pages / pool.total_pages for role, pool in named if pool.total_pages}
    return shares | {f"queue_{role}": pool.backlog_s / pool.num_workers for role, pool in named}


@dataclass(slots=True)
class _Pool:
    """Sums over the ready workers of a role."""

    num_workers: int = 0
    free_pages: int = 0
    total_pages: int = 0
    backlog_s: float = 0.0


def _of(columns: Mapping[str, F32], names: Iterable[str]) -> dict[str, F32]:
    return {name: columns[name] for name in names}


def _has_any(column: F32) -> bool:
    return bool(np.isfinite(column).any())


def _lists(columns: Mapping[str, F32]) -> Pieces[dict[str, list[float | None]]]:
    lists = {}
    for name, column in columns.items():
        lists[name] = _values(column)
        yield
    return lists


def _tables(buckets: Mapping[str, F32]) -> Pieces[dict[str, list[list[float]]]]:
    tables = {}
    for name, counts in buckets.items():
        tables[name] = _rounded(counts).tolist()
        yield
    return tables


def _num_intervals(part: ChartCounts) -> int:
    return len(part["sums"]["requests"])


def _placed(
    part: ChartCounts, values: Sequence[float | None] | Sequence[list[float]] | None, span: range, *width: int
) -> F64:
    """Return the values of one process as the rows of `span`; NaN where it has none."""
    placed = np.full((len(span), *width), np.nan)
    begun = round(part["begun_unix_s"] / INTERVAL_S)
    kept = range(max(begun, span.start), min(begun + _num_intervals(part), span.stop))
    if values is not None and kept:
        told = np.array(values[kept.start - begun : kept.stop - begun], np.float64)
        placed[kept.start - span.start : kept.stop - span.start] = told
    return placed


def _sum(parts: Sequence[F64]) -> F64:
    """Return the sum of those that have a value."""
    total: F64 = np.nansum(parts, axis=0)
    total[np.isnan(parts).all(0)] = np.nan
    return total


def _mean(parts: Sequence[F64]) -> F64:
    mean: F64 = _sum(parts) / np.maximum(1, np.isfinite(parts).sum(0))
    return mean


def _series(unit: str, values: F64) -> Series:
    return Series(unit=unit, values=_values(values))


def _values(column: F32 | F64) -> list[float | None]:
    """Return values as JSON has them."""
    rounded = _rounded(column)
    values: list[float | None] = rounded.tolist()
    for index in np.flatnonzero(~np.isfinite(rounded)).tolist():
        values[index] = None
    return values


def _rounded(values: F32 | F64) -> F64:
    """Return them with six significant digits: no chart shows more, and all of them would be three times as long."""
    exact = values.astype(np.float64)
    size = np.abs(exact)
    scale = 10.0 ** (5 - np.floor(np.log10(np.where((size > 0) & np.isfinite(size), size, 1.0))))
    return np.round(exact * scale) / scale
