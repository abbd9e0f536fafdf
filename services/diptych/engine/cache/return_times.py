"""Learns how long tools take until their sessions come back, and decides for how long a text is kept meanwhile. Pure.

A page that is kept takes memory from others; one that is gone is computed again, or read from a tier. So a text is kept
for the time `t` that minimises `price * E[min(gap, t)] + P(it comes back, but behind t)`, where the price is what its
memory would be worth a second to others, as a share of what its return is worth: the rule of Li et al., "Continuum:
efficient multi-turn agent serving with KV cache time-to-live" (2025), with both sides counted in pages. Where not all
fit, those go first that are least likely to be back soon: the most that a second more in memory can bring, in the mean
of the best time to go on keeping it (the index of Gittins, "Bandit processes and dynamic allocation indices", 1979).

Times are told apart in logarithmic buckets. For each the chance is learned that who is still away comes back within it
(Kaplan and Meier, 1958), so sessions that are away now count for as long as they have been, and those that never come
back need not be waited for. What is known of a tenant's tool forgets; one of which little is known is taken to be like
all tools here, and they like those of a published trace.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from diptych.common.arrays import F64

EDGES_S: Final = tuple(0.25 * 2 ** (k / 2) for k in range(26))  # upper ends of buckets, to 24 min
HORIZON_S: Final = EDGES_S[-1]  # who is away for longer does not come back
MEMORY: Final = 500  # returns after which one counts a third
EVIDENCE: Final = 4.0  # sessions: what all tools say counts as much for a tool as so many of its own
MAX_TOOLS: Final = 512  # of all tenants; of more, one of the tenant that has the most is forgotten
PUBLISHED: Final = ((0.5, 2.0), (0.9, 24.0), (0.99, 684.0))  # shares of gaps of coding agents (llm-d on GLM-5.2, 2026)

_WIDTHS: Final = np.diff(np.array((0.0, *EDGES_S)))


class ToolKey(NamedTuple):
    """Whose tool it is."""

    tenant: str
    tool: str


def bucket_of(away_s: float) -> int:
    """Return the bucket of a time; `len(EDGES_S)`: it is behind all."""
    return bisect_left(EDGES_S, away_s)


@dataclass(frozen=True, slots=True)
class Curve:
    """How many are still away: `[len(EDGES_S) + 1]`, at 0 and at the end of each bucket, 1 at first."""

    away: F64
    held_s: F64  # the same shape: for how long a session is kept in the mean, if no longer than that

    def ttl_s(self, price: float) -> float:
        """Return for how long to keep a text; `price`: of a second in memory, where what a return saves is 1."""
        best = int(np.argmin(price * self.held_s + self.away - self.away[-1]))
        return (0.0, *EDGES_S)[best]

    def wait_s(self, ttl_s: float) -> float:
        """Return for how long texts are kept for each return within `ttl_s`; infinite: none is expected."""
        end = bisect_left(EDGES_S, ttl_s) + 1
        chance = 1.0 - float(self.away[end])
        return float(self.held_s[end]) / chance if chance > 0 else math.inf

    def indices(self) -> list[float]:
        """Return what a second more in memory brings at best, by the bucket that a session is in; 0 behind all."""
        best = [
            float(((self.away[k] - self.away[k + 1 :]) / np.maximum(self.held_s[k + 1 :] - self.held_s[k], 1e-9)).max())
            for k in range(len(EDGES_S))
        ]
        return [*best, 0.0]


def curve_of(chances: F64) -> Curve:
    """Return the curve of such chances to come back within each bucket."""
    away = np.concatenate(([1.0], np.cumprod(1.0 - chances)))
    held_s = np.concatenate(([0.0], np.cumsum(_WIDTHS * (away[:-1] + away[1:]) / 2)))
    return Curve(away, held_s)


@dataclass(slots=True)
class _Counts:
    """By bucket: who was still away when it began, and who came back within it."""

    at_risk: F64 = field(default_factory=lambda: np.zeros(len(EDGES_S)))
    returned: F64 = field(default_factory=lambda: np.zeros(len(EDGES_S)))
    curve: Curve | None = None  # of these, if nothing has come since
    indices: list[float] = field(default_factory=list)

    def add(self, first: int, last: int, returned: int) -> None:
        if returned:
            self.at_risk *= 1.0 - 1.0 / MEMORY
            self.returned *= 1.0 - 1.0 / MEMORY
            self.returned[last - 1] += 1.0
        self.at_risk[first:last] += 1.0
        self.curve = None


class ReturnTimes:
    """What is known of the times that sessions are away. Bounded: `MAX_TOOLS` tools, some 2 KB each.

    Of more, the tenant that has the most forgets the one of which it was not heard for longest: so whoever makes up
    names of tools takes no more than an even share from others.
    """

    def __init__(self) -> None:
        self._all = _published()
        self._tools: OrderedDict[str, OrderedDict[str, _Counts]] = OrderedDict()  # by tenant; both heard of last, last

    def __len__(self) -> int:
        return sum(map(len, self._tools.values()))

    def passed(self, key: ToolKey, first: int, last: int) -> None:
        """Learn that a session is still away behind the buckets from `first` on, before `last`."""
        self._add(key, first, last, 0)

    def returned(self, key: ToolKey, first: int, bucket: int) -> None:
        """Learn that a session has come back in a bucket, and was away from bucket `first` on as far as is told."""
        self._add(key, min(first, bucket), min(bucket + 1, len(EDGES_S)), int(bucket < len(EDGES_S)))

    def ttl_s(self, key: ToolKey, price: float) -> float:
        """Return for how long to keep a text that a tool's call has left: see `Curve.ttl_s`."""
        return self._known(key).ttl_s(price)

    def wait_s(self, key: ToolKey, ttl_s: float) -> float:
        """Return how long one waits for a return, with those that do not come: see `Curve.wait_s`."""
        return self._known(key).wait_s(ttl_s)

    def index(self, key: ToolKey, away_s: float) -> float:
        """Return what a second more in memory brings of a session that has been away for so long."""
        self._known(key)
        counts = self._counts(key)
        if not counts.indices:
            assert counts.curve is not None
            counts.indices = counts.curve.indices()
        return counts.indices[bucket_of(away_s)]

    def _add(self, key: ToolKey, first: int, last: int, returned: int) -> None:
        own = self._tools.setdefault(key.tenant, OrderedDict())
        self._tools.move_to_end(key.tenant)
        is_new = key.tool not in own
        own.setdefault(key.tool, _Counts()).add(first, last, returned)
        own.move_to_end(key.tool)
        if is_new and len(self) > MAX_TOOLS:
            self._forget()
        self._all.add(first, last, returned)

    def _forget(self) -> None:
        """Forget a tool of the tenant that has the most; of equals, of the one that was not heard of for longest."""
        tenant = max(self._tools, key=lambda each: len(self._tools[each]))
        self._tools[tenant].popitem(last=False)
        if not self._tools[tenant]:
            del self._tools[tenant]

    def _counts(self, key: ToolKey) -> _Counts:
        """Return what is known of a tool; of all tools, if that is nothing."""
        own = self._tools.get(key.tenant)
        return self._all if own is None else own.get(key.tool, self._all)

    def _known(self, key: ToolKey) -> Curve:
        counts = self._counts(key)
        if counts.curve is None:
            usual = self._all.returned / np.maximum(self._all.at_risk, 1e-9)
            weight = EVIDENCE * curve_of(usual).away[:-1]
            chances = (counts.returned + usual * weight) / np.maximum(counts.at_risk + weight, 1e-9)
            counts.curve, counts.indices = curve_of(np.minimum(chances, 1.0)), []
        return counts.curve


def _published() -> _Counts:
    """Return `PUBLISHED` as `EVIDENCE` sessions; within a part times are even over magnitudes."""
    shares = [share for share, _ in PUBLISHED]
    at_s = [math.log(gap_s) for _, gap_s in PUBLISHED]
    back = np.interp(np.log(np.array(EDGES_S)), [math.log(EDGES_S[0] / 2), *at_s], [0.0, *shares])
    away = EVIDENCE * (1.0 - np.concatenate(([0.0], back)))
    return _Counts(away[:-1], -np.diff(away))
