"""Decides how many connections a server keeps, and which one is closed when there are too many. Pure.

Rule: a connection that has a request is never ended for another one. Of those that have none (they are silent between
two requests, or a head is not complete) the one that has waited longest goes; where there is none, the newcomer.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ConnectionPlaces(Generic[T]):
    """The connections of one server. Each step takes the same time, however many there are."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._waiting: dict[T, None] = {}  # for a request, the longest first
        self._working: set[T] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._working)

    def enter(self, newcomer: T) -> T | None:
        """Let a connection in; return the one that has to go for it, which has lost its place, if one has to."""
        self._waiting[newcomer] = None
        if len(self) <= self.num_places:
            return None
        leaving = next(iter(self._waiting))
        del self._waiting[leaving]
        return leaving

    def begin(self, connection: T) -> None:
        """It has a request."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._working.add(connection)

    def end(self, connection: T) -> None:
        """It has none any more."""
        if connection in self._working:
            self._working.remove(connection)
            self._waiting[connection] = None

    def leave(self, connection: T) -> None:
        """It is closed."""
        self._waiting.pop(connection, None)
        self._working.discard(connection)
