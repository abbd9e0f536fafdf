"""How often guesses come true, learned from those that were compared with what came. Pure.

A source says of each token of a guess how likely it and those before it are. What it says is corrected twice: by what
came of such words of this source in all requests, and by what came of them in this request. Each correction begins at
"it is true as said", or, of words that were not heard yet, as it is of the source's others, and moves with evidence.
The newest counts most, for texts change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

NUM_LEVELS: Final = 16  # of what is said
BELIEF: Final = 8.0  # tokens: what "as the source's others" weighs, in a level
SOURCE_BELIEF: Final = 8.0  # and "as said", of the source
MEMORY: Final = 256.0  # tokens of a level: beyond, half of what is known is forgotten
REQUEST_BELIEF: Final = 4.0  # and of a request
REQUEST_KEPT: Final = 0.95  # of what is known of a request, with each guess
MOST: Final = 4.0  # times likelier than said a request's guesses may be


@dataclass(slots=True)
class _Level:
    """Tokens that are said to be about as likely."""

    tried: float = 0.0
    said: float = 0.0  # how many should have come true
    came: float = 0.0

    def learn(self, said: float, came: float) -> None:
        self.tried += 1
        self.said += said
        self.came += came
        if self.tried > MEMORY:
            self.tried, self.said, self.came = self.tried / 2, self.said / 2, self.came / 2

    def factor(self, usual: float) -> float:
        """Return how much likelier they are than said, if others are `usual` times as likely."""
        if not self.tried:
            return usual
        believed = BELIEF * self.said / self.tried
        return (self.came + believed * usual) / (self.said + believed)


class Survival:
    """How far one source is to be believed."""

    def __init__(self) -> None:
        self._levels = [_Level() for _ in range(NUM_LEVELS)]
        self._all = _Level()
        self._factors: dict[int, float] = {}  # of levels, as far as they were asked for since something was learned

    def of(self, said: Sequence[float], factor: float) -> list[float]:
        """Return the chances of a guess's tokens, of which the source says `said`; `factor` is the request's."""
        corrected = (chance * factor * self._factor(_level(chance)) for chance in said)
        return list(accumulate(corrected, min, initial=1.0))[1:]

    def learn(self, said: Sequence[float], num_came: int) -> float:
        """Learn that the first `num_came` compared tokens of a guess came true; return how many should have."""
        expected = 0.0
        for at, chance in enumerate(said):
            level = _level(chance)
            expected += min(1.0, chance * self._factor(level))
            self._levels[level].learn(chance, at < num_came)
        self._all.learn(sum(said), num_came)
        self._factors.clear()
        return expected

    def _factor(self, level: int) -> float:
        factor = self._factors.get(level)
        if factor is None:
            usual = (self._all.came + SOURCE_BELIEF) / (self._all.said + SOURCE_BELIEF)
            factor = self._factors[level] = self._levels[level].factor(usual)
        return factor


@dataclass(slots=True)
class RequestSurvival:
    """How far guesses for one request are to be believed, beside what is true of all."""

    came: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        return min(MOST, (self.came + REQUEST_BELIEF) / (self.expected + REQUEST_BELIEF))

    def learn(self, expected: float, num_came: int) -> None:
        self.came = REQUEST_KEPT * self.came + num_came
        self.expected = REQUEST_KEPT * self.expected + expected


def _level(chance: float) -> int:
    return int(chance * NUM_LEVELS) if chance < 1 else NUM_LEVELS - 1
