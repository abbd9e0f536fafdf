"""How often guesses come true, learned from those that were compared with what came. Pure.

A source says of each token of a guess how likely it and those before it are. What it says is corrected twice: by what
came of such words of this source in all requests, and by what came of them in this request. Each correction begins at
"it is true as said", and moves with evidence; the newest counts most, for texts change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

NUM_LEVELS: Final = 16  # of what is said
BELIEF: Final = 8.0  # tokens: what "as said" weighs, in a level
MEMORY: Final = 256.0  # tokens of a level: beyond, half of what is known is forgotten
REQUEST_BELIEF: Final = 4.0  # and of a request
REQUEST_KEPT: Final = 0.95  # of what is known of a request, with each guess
MOST: Final = 4.0  # times likelier than said a request's guesses may be


class Survival:
    """How far one source is to be believed."""

    def __init__(self) -> None:
        self._factors = [1.0] * NUM_LEVELS
        self._said = [0.0] * NUM_LEVELS
        self._came = [0.0] * NUM_LEVELS
        self._tried = [0.0] * NUM_LEVELS

    def of(self, said: Sequence[float], factor: float) -> list[float]:
        """Return the chances of a guess's tokens, of which the source says `said`; `factor` is the request's."""
        factors = self._factors
        corrected = (chance * factor * factors[_level(chance)] for chance in said)
        return list(accumulate(corrected, min, initial=1.0))[1:]

    def learn(self, said: Sequence[float], num_came: int) -> float:
        """Of the tokens of a guess that were compared, the first `num_came` came true; return how many should have."""
        expected, levels = 0.0, set()
        for at, chance in enumerate(said):
            level = _level(chance)
            levels.add(level)
            expected += min(1.0, chance * self._factors[level])
            self._tried[level] += 1
            self._said[level] += chance
            if at < num_came:
                self._came[level] += 1
        for level in levels:
            self._fit(level)
        return expected

    def _fit(self, level: int) -> None:
        if self._tried[level] > MEMORY:
            self._tried[level] /= 2
            self._said[level] /= 2
            self._came[level] /= 2
        mean = self._said[level] / self._tried[level]
        self._factors[level] = (self._came[level] + BELIEF * mean) / (self._said[level] + BELIEF * mean)


@dataclass(slots=True)
class RequestSurvival:
    """How far guesses for one request are to be believed, beside what is true of all."""

    came: float = field(default=0.0)
    expected: float = field(default=0.0)

    @property
    def factor(self) -> float:
        return min(MOST, (self.came + REQUEST_BELIEF) / (self.expected + REQUEST_BELIEF))

    def learn(self, expected: float, num_came: int) -> None:
        self.came = REQUEST_KEPT * self.came + num_came
        self.expected = REQUEST_KEPT * self.expected + expected


def _level(chance: float) -> int:
    return int(chance * NUM_LEVELS) if chance < 1 else NUM_LEVELS - 1
