"""Who is worked on next when more is asked for than the router takes at once. Pure: it is told the time.

Rule: the highest priority goes first, then who came first, and nobody passes the head of the line, so that what needs
many places gets them. Whoever can't begin in time, by the pace at which places come free, is refused when it comes and
not when its time is up; but the first in line may always wait, else a pace that was slow once would never be corrected.
A full line refuses whoever would be served last, be that the newcomer or not.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_RETRY_AFTER_S: Final = 60.0
PACE_WEIGHT: Final = 0.1  # of the newest interval between departures


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


class Reason(enum.Enum):
    """Why a claim is refused."""

    FULL = "full"  # nobody in line may be refused in its place
    DISPLACED = "displaced"  # by a higher priority, when the line was full
    TOO_LATE = "too_late"  # it would not begin in time
    EXPIRED = "expired"  # it has not begun in time
    SLO = "slo"  # its first token would come later than it wants it


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


@dataclass(frozen=True, slots=True, order=True)
class _Waiting:
    rank: int  # minus the priority
    number: int
    num_requests: int = field(compare=False)
    latest_s: float = field(compare=False)  # to begin


class AdmissionQueue:
    """Numbers claims as they come. Each is admitted or refused once, and `leave`s once unless it was refused."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._running: dict[int, int] = {}  # claim to its places
        self._line: list[_Waiting] = []  # in the order in which they will be admitted
        self._pace = _Pace()
        self._next_number = 0
        self.num_running = 0  # requests
        self.num_waiting = 0

    @property
    def next_expiry_s(self) -> float | None:
        """When `expire` is due next."""
        return min((waiting.latest_s for waiting in self._line), default=None)

    def offer(self, claim: Claim, now_s: float) -> tuple[int, Sequence[Outcome]]:
        """Take a claim; return its number and what becomes of it and of others. No outcome of it: it waits."""
        number = self._next_number
        self._next_number += 1
        patience_s = min(claim.patience_s, self._limits.max_wait_s)
        newcomer = _Waiting(-claim.priority, number, claim.num_requests, now_s + patience_s)
        position = bisect.bisect(self._line, newcomer)
        if position == 0 and self._has_room(newcomer):
            return number, [self._begin(newcomer)]
        displaced = self._displaced_by(newcomer, position)
        if displaced is None:
            return number, [self._refused(newcomer, Reason.FULL)]
        late_s = self._wait_s(newcomer, position) - patience_s
        if late_s > 0 and self._line:
            return number, [Refused(number, Reason.TOO_LATE, min(late_s, MAX_RETRY_AFTER_S))]
        outcomes = [self._take_out(waiting, Reason.DISPLACED) for waiting in displaced]
        self._pace.begin(now_s)
        self._line.insert(position, newcomer)
        self.num_waiting += newcomer.num_requests
        return number, outcomes

    def leave(self, number: int, now_s: float) -> Sequence[Outcome]:
        """A claim has ended, or is given up while it waits; return what that makes possible."""
        if number in self._running:
            count = self._running.pop(number)
            self._pace.note(count, now_s, is_full=bool(self._line))
            self.num_running -= count
        else:
            given_up = next((waiting for waiting in self._line if waiting.number == number), None)
            if given_up is not None:
                self._remove(given_up)
        return self._admit()

    def expire(self, now_s: float) -> Sequence[Outcome]:
        """Refuse those that have waited for too long; return what comes of it."""
        expired = [waiting for waiting in self._line if waiting.latest_s <= now_s]
        refused: list[Outcome] = [self._take_out(waiting, Reason.EXPIRED) for waiting in expired]
        return [*refused, *self._admit()]

    def _admit(self) -> list[Outcome]:
        admitted: list[Outcome] = []
        while self._line and self._has_room(self._line[0]):
            waiting = self._line[0]
            self._remove(waiting)
            admitted.append(self._begin(waiting))
        return admitted

    def _has_room(self, waiting: _Waiting) -> bool:
        return self.num_running + waiting.num_requests <= self._limits.max_running

    def _begin(self, waiting: _Waiting) -> Admitted:
        self._running[waiting.number] = waiting.num_requests
        self.num_running += waiting.num_requests
        return Admitted(waiting.number)

    def _displaced_by(self, newcomer: _Waiting, position: int) -> Sequence[_Waiting] | None:
        """Return who has to go for a newcomer, last of the line first; None if that is not enough."""
        lacking = self.num_waiting + newcomer.num_requests - self._limits.max_waiting
        displaced = []
        for waiting in reversed(self._line[position:]):
            if lacking <= 0:
                break
            displaced.append(waiting)
            lacking -= waiting.num_requests
        return None if lacking > 0 else displaced

    def _wait_s(self, newcomer: _Waiting, position: int) -> float:
        """How long it will take until places for a newcomer are free."""
        ahead = sum(waiting.num_requests for waiting in self._line[:position])
        lacking = ahead + newcomer.num_requests - (self._limits.max_running - self.num_running)
        return lacking * self._pace.seconds_per_place

    def _take_out(self, waiting: _Waiting, reason: Reason) -> Refused:
        self._remove(waiting)
        return self._refused(waiting, reason)

    def _refused(self, waiting: _Waiting, reason: Reason) -> Refused:
        """The line will have gone once everybody in it has got a place."""
        line_s = self.num_waiting * self._pace.seconds_per_place
        return Refused(waiting.number, reason, min(line_s, MAX_RETRY_AFTER_S))

    def _remove(self, waiting: _Waiting) -> None:
        self._line.remove(waiting)
        self.num_waiting -= waiting.num_requests


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
