"""Who is worked on next when more is asked for than the router takes at once. Pure: it is told the time.

Rule: what is of no sheddable tier goes first, then heavier tiers before lighter ones; within a tier the highest
priority goes first; among equals tenants take turns by places (`fair_queue`), and a tenant's claims go as they came.
Nobody passes the head of a line, so that what needs many places gets them. Whoever can't begin in time, by the pace at
which places come free, is refused when it comes and not when its time is up; but the first in line may always wait,
else a pace that was slow once would never be corrected. A full line refuses for a newcomer whoever has less right to
wait: the lightest sheddable tiers, then the lowest priorities, then the newest claims of tenants that wait for more
places than the newcomer's will. Where that is not enough, it refuses the newcomer.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from diptych.router.admission.fair_queue import FairQueue, Rank, Waiting

MAX_RETRY_AFTER_S: Final = 60.0
PACE_WEIGHT: Final = 0.1  # of the newest interval between departures
MIN_DEPARTED: Final = 64  # of those that left the line, to be looked through at once


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How much the router takes."""

    max_running: int  # requests at once
    max_waiting: int  # requests in line; 0: there is none
    max_wait_s: float  # in line


@dataclass(frozen=True, slots=True)
class Claim:
    """What somebody asks for: all of it at once, or nothing."""

    num_requests: int = 1
    priority: int = 0  # higher first
    patience_s: float = float("inf")  # to begin later than that is of no use
    tenant: str = ""  # whose share of the places it takes
    weight: float = math.inf  # of its sheddable tier; infinite: it is of none


class Reason(enum.Enum):
    """Why a claim is refused."""

    FULL = "full"  # nobody in line may be refused in its place
    DISPLACED = "displaced"  # by a higher priority, when the line was full
    OVER_SHARE = "over_share"  # by a tenant that waited for fewer places, when the line was full
    TOO_LATE = "too_late"  # it would not begin in time
    EXPIRED = "expired"  # it has not begun in time
    TTFT_DEADLINE = "ttft_deadline"  # its first token would come later than it is of use
    SHED = "shed"  # its tier gives way to others


@dataclass(frozen=True, slots=True)
class Admitted:
    """The claim holds its places."""

    number: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The claim is gone."""

    number: int
    reason: Reason
    retry_after_s: float  # when it may be better, as far as can be said


Outcome = Admitted | Refused


class AdmissionQueue:
    """Numbers claims as they come. Each is admitted or refused once, and `leave`s once unless it was refused."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._running: dict[int, int] = {}  # claim to its places
        self._waiting: dict[int, Waiting] = {}  # by number
        self._lines: dict[Rank, FairQueue] = {}  # never empty
        self._expiries = _Expiries()
        self._pace = _Pace()
        self._next_number = 0
        self.num_running = 0  # requests
        self.num_waiting = 0

    @property
    def next_expiry_s(self) -> float | None:
        """When `expire` is due next."""
        return self._expiries.next_s(self._waiting)

    def offer(self, claim: Claim, now_s: float) -> tuple[int, Sequence[Outcome]]:
        """Take a claim; return its number and what becomes of it and of others. No outcome of it: it waits."""
        number = self._next_number
        self._next_number += 1
        patience_s = min(claim.patience_s, self._limits.max_wait_s)
        rank = (-claim.weight, -claim.priority)
        newcomer = Waiting(number, claim.tenant, rank, claim.num_requests, now_s + patience_s)
        ahead = self._places_ahead(newcomer)
        if not ahead and self._has_room(newcomer):
            return number, [self._begin(newcomer)]
        displaced = self._displaced_by(newcomer)
        if displaced is None:
            return number, [self._refused(newcomer, Reason.FULL)]
        late_s = self._wait_s(newcomer, ahead) - patience_s
        if late_s > 0 and self._waiting:
            return number, [Refused(number, Reason.TOO_LATE, min(late_s, MAX_RETRY_AFTER_S))]
        outcomes = [self._refuse(waiting, _reason(waiting, newcomer)) for waiting in displaced]
        self._pace.begin(now_s)
        self._add(newcomer)
        return number, outcomes

    def leave(self, number: int, now_s: float) -> Sequence[Outcome]:
        """A claim has ended, or is given up while it waits; return what that makes possible."""
        if number in self._running:
            count = self._running.pop(number)
            self._pace.note(count, now_s, is_full=bool(self._waiting))
            self.num_running -= count
        elif number in self._waiting:
            self._remove(self._waiting[number])
        return self._admit()

    def expire(self, now_s: float) -> Sequence[Outcome]:
        """Refuse those that have waited for too long; return what comes of it."""
        refused: list[Outcome] = []
        while (due_s := self.next_expiry_s) is not None and due_s <= now_s:
            refused.append(self._refuse(self._waiting[self._expiries.first], Reason.EXPIRED))
        return [*refused, *self._admit()]

    def _admit(self) -> list[Outcome]:
        admitted: list[Outcome] = []
        while self._lines:
            line = self._lines[min(self._lines)]
            waiting = line.next()
            if not self._has_room(waiting):
                break
            line.charge(waiting)
            self._remove(waiting)
            admitted.append(self._begin(waiting))
        return admitted

    def _has_room(self, waiting: Waiting) -> bool:
        return self.num_running + waiting.num_places <= self._limits.max_running

    def _begin(self, waiting: Waiting) -> Admitted:
        self._running[waiting.number] = waiting.num_places
        self.num_running += waiting.num_places
        return Admitted(waiting.number)

    def _places_ahead(self, newcomer: Waiting) -> int:
        """Return how many places that wait will be served before a newcomer, if nobody else comes."""
        higher = sum(line.num_places for rank, line in self._lines.items() if rank < newcomer.rank)
        line = self._lines.get(newcomer.rank)
        return higher + (line.places_ahead(newcomer.tenant) if line else 0)

    def _displaced_by(self, newcomer: Waiting) -> Sequence[Waiting] | None:
        """Return who has to go for a newcomer; None if that is not enough."""
        lacking = self.num_waiting + newcomer.num_places - self._limits.max_waiting
        displaced: list[Waiting] = []
        for rank in sorted(self._lines, reverse=True):
            if lacking <= 0 or rank < newcomer.rank:
                break
            line = self._lines[rank]
            fair = line.num_places_of(newcomer.tenant) + newcomer.num_places if rank == newcomer.rank else 0
            found = line.newest_of_longest(lacking, above=fair)
            displaced += found
            lacking -= sum(waiting.num_places for waiting in found)
        return None if lacking > 0 else displaced

    def _wait_s(self, newcomer: Waiting, ahead: int) -> float:
        """How long it will take until places for a newcomer are free."""
        lacking = ahead + newcomer.num_places - (self._limits.max_running - self.num_running)
        return lacking * self._pace.seconds_per_place

    def _refuse(self, waiting: Waiting, reason: Reason) -> Refused:
        self._remove(waiting)
        return self._refused(waiting, reason)

    def _refused(self, waiting: Waiting, reason: Reason) -> Refused:
        """The line will have gone once everybody in it has got a place."""
        line_s = self.num_waiting * self._pace.seconds_per_place
        return Refused(waiting.number, reason, min(line_s, MAX_RETRY_AFTER_S))

    def _add(self, waiting: Waiting) -> None:
        self._lines.setdefault(waiting.rank, FairQueue()).add(waiting)
        self._waiting[waiting.number] = waiting
        self._expiries.add(waiting)
        self.num_waiting += waiting.num_places

    def _remove(self, waiting: Waiting) -> None:
        line = self._lines[waiting.rank]
        line.remove(waiting)
        if not line.num_places:
            del self._lines[waiting.rank]
        del self._waiting[waiting.number]
        self.num_waiting -= waiting.num_places


def _reason(displaced: Waiting, newcomer: Waiting) -> Reason:
    if displaced.rank[0] > newcomer.rank[0]:
        return Reason.SHED
    return Reason.DISPLACED if displaced.rank > newcomer.rank else Reason.OVER_SHARE


class _Expiries:
    """Finds who will have waited for too long first. Who has left the line meanwhile is dropped when it is met."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # latest_s, number

    @property
    def first(self) -> int:
        """The number of the claim that `next_s` is of."""
        return self._heap[0][1]

    def add(self, waiting: Waiting) -> None:
        heapq.heappush(self._heap, (waiting.latest_s, waiting.number))

    def next_s(self, waiting: Mapping[int, Waiting]) -> float | None:
        """Return when the first of those that wait has waited for too long."""
        if len(self._heap) > 2 * len(waiting) + MIN_DEPARTED:
            self._heap = sorted((each.latest_s, each.number) for each in waiting.values())
        while self._heap and self._heap[0][1] not in waiting:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class _Pace:
    """How long it takes, on average, until a place comes free while somebody waits for one."""

    def __init__(self) -> None:
        self.seconds_per_place = 0.0  # nothing is known yet
        self._last_s: float | None = None  # when one came free last, or was missed first; None: nobody misses one

    def begin(self, now_s: float) -> None:
        """Somebody begins to wait."""
        if self._last_s is None:
            self._last_s = now_s

    def note(self, num_places: int, now_s: float, *, is_full: bool) -> None:
        if is_full and self._last_s is not None:
            interval_s = (now_s - self._last_s) / num_places
            weight = PACE_WEIGHT if self.seconds_per_place else 1.0
            self.seconds_per_place += weight * (interval_s - self.seconds_per_place)
        self._last_s = now_s if is_full else None
