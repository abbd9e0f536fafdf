"""Which workers and links are left alone for a while because requests keep failing on them. Pure: it is told the time.

A *breaker* opens after so many failures in a row, each blamed on whoever the reason points at. When both sides may be
at fault, both are blamed and so is their link: the side that is sound soon succeeds with another peer, and is clear
again. When the pause is over a single request tries: if it succeeds the breaker closes, if it fails the pause doubles.

Rule: breakers only choose among pairs. Where every pair has an open one, those with the fewest serve: no breaker ever
makes a request fail.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.router.workers.worker_view import Pair

FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
MEMORY_S: Final = 60.0  # failures further apart than that are not in a row

Suspect = int | Pair  # a worker by its instance id, or the link between two


class Pause(NamedTuple):
    """What an open breaker says."""

    num_failures: int  # in a row
    left_s: float

    def __str__(self) -> str:
        return f"left alone for {math.ceil(self.left_s)} s more: {self.num_failures} requests in a row failed"


@dataclass(slots=True)
class _Breaker:
    """The failures of one worker, or of one link."""

    num_failures: int = 0  # in a row
    last_failure_s: float = 0.0
    pause_s: float = 0.0  # the last one; 0: it has never opened
    closed_from_s: float = 0.0  # when the next request may try
    is_trying: bool = False  # one does


class Breakers:
    """The breakers of all workers and links that have failed lately."""

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures  # in a row; 0: nothing ever opens
        self._breakers: dict[Suspect, _Breaker] = {}

    def choose(self, pairs: Sequence[Pair], now_s: float) -> Sequence[Pair]:
        """Return the pairs to choose from, at least one of `pairs` unless that is empty."""
        opened = self.opened(now_s)
        if not opened:
            return pairs
        counts = [sum(suspect in opened for suspect in suspects_of(pair)) for pair in pairs]
        least = min(counts, default=0)
        return [pair for pair, count in zip(pairs, counts, strict=True) if count == least]

    def opened(self, now_s: float) -> Collection[Suspect]:
        """Whom to leave alone now."""
        return {suspect for suspect, breaker in self._breakers.items() if breaker.closed_from_s > now_s}

    def pauses(self, now_s: float) -> Mapping[Suspect, Pause]:
        """Say of those to leave alone now how long, and why."""
        left_s = {suspect: breaker.closed_from_s - now_s for suspect, breaker in self._breakers.items()}
        return {key: Pause(self._breakers[key].num_failures, each_s) for key, each_s in left_s.items() if each_s > 0}

    def begin(self, pair: Pair, now_s: float) -> None:
        """A request begins on a pair: where a pause is over it is the one that tries, and others wait a pause more."""
        for suspect in suspects_of(pair) if self._breakers else ():
            breaker = self._breakers.get(suspect)
            if breaker is not None and breaker.pause_s and breaker.closed_from_s <= now_s:
                breaker.is_trying = True
                breaker.closed_from_s = now_s + breaker.pause_s

    def succeed(self, pair: Pair) -> None:
        """A pair has served a request. What is left alone, only a try clears."""
        for suspect in suspects_of(pair) if self._breakers else ():
            breaker = self._breakers.get(suspect)
            if breaker is not None and (breaker.is_trying or not breaker.pause_s):
                del self._breakers[suspect]

    def fail(self, suspects: Iterable[Suspect], now_s: float) -> Sequence[Suspect]:
        """One of these is why a request failed. Return those that are left alone from now on."""
        if not self._max_failures:
            return ()
        self._forget(now_s)
        return [s for s in suspects if self._opens(self._breakers.setdefault(s, _Breaker()), now_s)]

    def _opens(self, breaker: _Breaker, now_s: float) -> bool:
        breaker.num_failures += 1
        breaker.last_failure_s = now_s
        if breaker.is_trying:
            breaker.pause_s = min(2 * breaker.pause_s, MAX_PAUSE_S)
        elif breaker.num_failures == self._max_failures:
            breaker.pause_s = FIRST_PAUSE_S
        else:
            return False
        breaker.is_trying = False
        breaker.closed_from_s = now_s + breaker.pause_s
        return True

    def _forget(self, now_s: float) -> None:
        """Workers come and go: what has not failed for long is not remembered."""
        old = [suspect for suspect, breaker in self._breakers.items() if now_s - breaker.last_failure_s > MEMORY_S]
        for suspect in old:
            del self._breakers[suspect]


def suspects_of(pair: Pair) -> Sequence[Suspect]:
    """Return who may be at fault where a pair fails."""
    return (pair.prefill_id, pair) if pair.is_local else (pair.prefill_id, pair.decode_id, pair)
