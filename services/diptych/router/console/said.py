"""What the other routers said last of one topic, and which of them are asked now. Pure.

Rule: one answer that does not come, likeliest from a busy process, takes nothing away of what was said before; a second
one does. Who did not answer is asked again soon, each time after twice as long, or when all are asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

AGAIN_S: Final = 0.9  # until who did not answer for the first time is asked again

Json = Mapping[str, Any]


class _Silence(NamedTuple):
    """That of a router which did not answer."""

    pause_s: float
    end_s: float  # when it is asked again


class Said:
    """The answers of one topic."""

    def __init__(self) -> None:
        self.answers: Sequence[Json] = ()  # of all routers: another object when one of them is another
        self.due_s = -math.inf  # when all are asked
        self._by_router: Mapping[int, Json] = {}
        self._silences: Mapping[int, _Silence] = {}

    def whom(self, present: Set[int], now_s: float) -> Set[int]:
        """Forget who is not there any more, and return who is asked now."""
        if gone := self._by_router.keys() - present:
            self._set({key: said for key, said in self._by_router.items() if key not in gone})
        self._silences = {key: silence for key, silence in self._silences.items() if key in present}
        if now_s >= self.due_s:
            return present
        return {key for key, silence in self._silences.items() if now_s >= silence.end_s}

    def note(self, asked: Set[int], answers: Mapping[int, Json], now_s: float) -> None:
        """Take what those said who were asked at `now_s`; the others of them did not answer."""
        silent = asked - answers.keys()
        dropped = silent & self._silences.keys()
        self._set({**{key: said for key, said in self._by_router.items() if key not in dropped}, **answers})
        before = {key: silence for key, silence in self._silences.items() if key not in asked}
        self._silences = {**before, **{key: self._silence(key, now_s) for key in silent}}

    def _set(self, by_router: Mapping[int, Json]) -> None:
        self._by_router = by_router
        self.answers = (*by_router.values(),)

    def _silence(self, key: int, now_s: float) -> _Silence:
        pause_s = 2 * self._silences[key].pause_s if key in self._silences else AGAIN_S
        return _Silence(pause_s, now_s + pause_s)
