"""The schedule policies, by the name that selects them: in which order one tenant's waiting requests are admitted.

Rule: no starvation. A policy ranks a request by instants that stay fixed, so that whoever arrives much later ranks
behind it, whatever else it is; what `choose` prefers over the first in line must be bounded in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Protocol

from diptych.engine.values.request import Request

AGING_S: Final = 10.0  # of waiting that are worth one level of priority
AHEAD_S: Final = 60.0  # of a job's time that count for a request that goes on with it
NO_DEADLINE_S: Final = 600.0  # after which a request without a deadline counts as due, and so never starves
IDLE_PATIENCE_S: Final = 60.0  # after which even work for idle time has its turn
PATIENCE_S: Final = 5.0  # after which the first in line goes, whatever is cached


class Policy(Protocol):
    """Orders waiting requests."""

    def rank(self, request: Request) -> float:
        """Return the request's place in line, smaller first. Asked once, when it arrives."""
        ...

    def choose(self, line: Sequence[Request], now_s: float) -> Request:
        """Return whom to admit next of the first in line, at least one, which are in order of rank."""
        ...


@dataclass(frozen=True, slots=True)
class ByRank:
    """Implements `Policy` by a rank alone: the first in line is next."""

    rank: Callable[[Request], float]

    def choose(self, line: Sequence[Request], now_s: float) -> Request:
        return line[0]


def arrival(request: Request) -> float:
    """First come, first served; but jobs are served, not requests.

    One that goes on with a job came as early as the job began, within a bound: so whoever arrives that much later is
    behind a new request, whatever job it is of. (Program-level first come, first served: Li et al., "Continuum", 2025.)
    """
    return request.life.arrival_s - min(request.job_s, AHEAD_S)


def aged_priority(request: Request) -> float:
    """Highest priority first, with aging: "priority plus time waited" orders two requests the same way at any time."""
    return arrival(request) - AGING_S * request.account.priority


def deadline(request: Request) -> float:
    """Earliest deadline first."""
    life = request.life
    return life.arrival_s + NO_DEADLINE_S if life.deadline_s == math.inf else life.deadline_s


class FirstCome:
    """Implements `Policy`: first come, first served, but a job goes on while most of its text is cached.

    Else those before it would take that memory, and it would take theirs when it has its turn. Of several that has most
    text. Whoever arrives `AHEAD_S` later than somebody never passes him, as by rank; and nobody passes who may still
    have his first token in time. `cached_len` as below.
    """

    def __init__(self, cached_len: Callable[[Request], int]) -> None:
        self._cached_len = cached_len

    def rank(self, request: Request) -> float:
        return arrival(request)

    def choose(self, line: Sequence[Request], now_s: float) -> Request:
        if len(line) == 1 or not any([request.job_s for request in line]):
            return line[0]
        until_s = min(request.life.arrival_s for request in line) + AHEAD_S
        passable = takewhile(lambda request: not _is_in_time(request, now_s), line)
        going_on = [request for request in passable if request.job_s and request.life.arrival_s < until_s]
        cached = {request: self._cached_len(request) for request in going_on}
        kept = [each for each, num_tokens in cached.items() if 2 * num_tokens > each.prompt_len]
        return max(kept, key=cached.__getitem__, default=line[0])


class LongestPrefixMatch:
    """Implements `Policy`. Of the first in line it takes whose prefix is cached now, before that is evicted.

    `cached_len` tells how many tokens of a request the prefix cache has now.
    """

    def __init__(self, cached_len: Callable[[Request], int]) -> None:
        self._cached_len = cached_len

    def rank(self, request: Request) -> float:
        return arrival(request)

    def choose(self, line: Sequence[Request], now_s: float) -> Request:
        if len(line) == 1 or line[0].life.arrival_s + PATIENCE_S <= now_s:
            return line[0]
        return max(line, key=self._cached_len)  # of equal ones the first


class InTime:
    """Implements `Policy` by another one, but who may still have its first token in time passes those who can't.

    They are late already: so a queue that is too long for a moment costs their SLOs, and not everybody's that comes
    behind them. No more than `PATIENCE_S` later they have their turn again.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def rank(self, request: Request) -> float:
        return self._policy.rank(request)

    def choose(self, line: Sequence[Request], now_s: float) -> Request:
        first = self._policy.choose(line, now_s)
        if not gives_way(first, now_s):
            return first
        passing = [request for request in line if _is_in_time(request, now_s)]
        return self._policy.choose(passing, now_s) if passing else first


def _is_in_time(request: Request, now_s: float) -> bool:
    """Whether a request's first token may still be."""
    return now_s <= due_s(request) < math.inf and not request.is_idle_work


def gives_way(request: Request, now_s: float) -> bool:
    """Whether others go first, but not for ever: it is work for idle time, or its first token is late anyway."""
    if request.is_idle_work:
        return now_s - request.life.arrival_s < IDLE_PATIENCE_S
    return bool(request.slo.ttft_s) and PATIENCE_S > now_s - due_s(request) > 0


def due_s(request: Request) -> float:
    """Return when its first token is due by its SLO; infinite: nobody said."""
    return request.life.arrival_s + request.slo.ttft_s if request.slo.ttft_s else math.inf


POLICIES: Final[Mapping[str, Callable[[Callable[[Request], int]], Policy]]] = {
    "fcfs": FirstCome,
    "lpm": LongestPrefixMatch,
    "priority": lambda cached_len: ByRank(aged_priority),
    "deadline": lambda cached_len: ByRank(deadline),
}
