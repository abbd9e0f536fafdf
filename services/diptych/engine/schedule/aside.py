"""Requests that let others pass, and why: many may wait for one reason, which is asked once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from diptych.engine.values.request import Request

MAX_ASIDE: Final = 256  # reasons to wait: it is asked of each, whenever some may be admitted, whether it is over


class Reason(Protocol):
    """Why a request does better to wait. Several may wait for the same one."""

    @property
    def until_s(self) -> float:
        """When it is over at the latest; infinity: an event ends it."""
        ...

    def is_over(self, now_s: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Waiters:
    reason: Reason
    rooms: set[int]


class Aside:
    """In the order in which they were set aside."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[Request, Reason]] = {}  # by room
        self.waiters: dict[int, _Waiters] = {}  # by the identity of their reason; never empty

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.room in self._requests

    def has_place(self, reason: Reason) -> bool:
        """Whether there are not too many reasons with this one."""
        return len(self.waiters) < MAX_ASIDE or id(reason) in self.waiters

    def add(self, request: Request, reason: Reason) -> None:
        self._requests[request.room] = request, reason
        self.waiters.setdefault(id(reason), _Waiters(reason, set())).rooms.add(request.room)

    def remove(self, request: Request) -> bool:
        """Take out a request. False: it was not here."""
        _, reason = self._requests.pop(request.room, (None, None))
        if reason is None:
            return False
        waiters = self.waiters[id(reason)]
        waiters.rooms.discard(request.room)
        if not waiters.rooms:
            del self.waiters[id(reason)]
        return True

    def pop_over(self, now_s: float) -> list[Request]:
        """Take out those whose reason is over, and return them."""
        if not self.waiters:
            return []
        ended = {key for key, waiters in self.waiters.items() if waiters.reason.is_over(now_s)}
        if not ended:
            return []
        over = [request for request, reason in self._requests.values() if id(reason) in ended]
        for request in over:
            self.remove(request)
        return over

    def next_s(self) -> float | None:
        """Return when one comes back, if no event brings it back before."""
        first_s = min((waiters.reason.until_s for waiters in self.waiters.values()), default=math.inf)
        return None if first_s == math.inf else first_s
