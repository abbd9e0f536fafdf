"""Keeps places for calls of callers that have shown nothing. They are few, and a new call gets that of the oldest.

An honest call of a stranger, a health check or one that is refused, is over at once. A call that stays for long sends
nothing or reads nothing, and however many such calls there are, they never hold the places of members.
Pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Final

NUM_PLACES: Final = 256


class Place:
    """What one call holds."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.end = end
        self.is_lost = False  # to a newcomer


class Strangers:
    """The calls of strangers that are open at a server."""

    def __init__(self, num_places: int = NUM_PLACES) -> None:
        self._num_places = num_places
        self._taken: dict[Place, None] = {}  # oldest first

    @contextlib.contextmanager
    def place(self, end: Callable[[], object]) -> Generator[Place, None, None]:
        """Hold a place, until a newcomer takes it: then `end` is called."""
        if len(self._taken) >= self._num_places:
            self._displace(next(iter(self._taken)))
        place = Place(end)
        self._taken[place] = None
        try:
            yield place
        finally:
            self._taken.pop(place, None)

    def _displace(self, place: Place) -> None:
        del self._taken[place]
        place.is_lost = True
        place.end()
