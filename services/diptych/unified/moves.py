"""Requests on their way to another worker, between the two cores of this one.

A move begins with a request of the decode core that runs, and is held there. As soon as no step has it, its pages are
those of a computed prompt in the prefill core, under a new room, and its room in the decode core waits. When the peer
has acknowledged the KV, that room ends. If the new room fails, the pages come back, and the request runs on.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.decode.leaving import Leaving
from diptych.engine.values.events import Move
from diptych.generation.output import Failure, FailureCode
from diptych.prefill.core import PrefillCore


@dataclass(frozen=True, slots=True)
class NotMoved:
    """A move that comes to nothing before the prefill core has it."""

    room: int
    failure: Failure


class Moves:
    """Call `settle` whenever something may have ended: an event, a step, a deadline."""

    def __init__(self, leaving: Leaving, prefill: PrefillCore) -> None:
        self._leaving = leaving
        self._prefill = prefill
        self._held: dict[int, Move] = {}  # by new room, until no step has the request
        self._num_sent = 0  # that the prefill core has

    def begin(self, move: Move) -> NotMoved | None:
        problem = self._leaving.refuse(move.moved, move.peer)
        if problem is not None:
            return _not_moved(move, problem)
        self._leaving.hold(move.moved)
        self._held[move.room] = move
        return None

    @property
    def has_any(self) -> bool:
        """Whether a request is held, or on its way."""
        return bool(self._num_sent or self._held)

    def has(self, room: int) -> bool:
        """Whether a request of that new room is held."""
        return room in self._held

    def cancel(self, room: int, failure: Failure, now_s: float) -> NotMoved:
        """Let a request that is held run on."""
        self._leaving.release(self._held.pop(room).moved, now_s)
        return NotMoved(room, failure)

    def settle(self, now_s: float) -> list[NotMoved]:
        """Pass on what is still, and take back or let go what has returned. Return what will never be sent."""
        if self._num_sent:
            self._take_returned(now_s)
        if not self._held:
            return []
        still = [move for move in self._held.values() if self._leaving.is_still(move.moved)]
        return [found for move in still if (found := self._send(move, now_s)) is not None]

    def _send(self, move: Move, now_s: float) -> NotMoved | None:
        del self._held[move.room]
        heir = self._leaving.give_away(move.moved, move.room)
        if heir is None:
            return _not_moved(move, "it has ended meanwhile")
        self._num_sent += 1
        self._prefill.hand_over(heir, move.moved, move.peer, now_s)
        return None

    def _take_returned(self, now_s: float) -> None:
        for room in self._prefill.pop_returned():
            self._num_sent -= 1
            if room.failure is None:
                self._leaving.let_go(room.moved, room.request)
            else:
                self._leaving.take_back(room.moved, room.request, now_s)


def _not_moved(move: Move, problem: str) -> NotMoved:
    return NotMoved(move.room, Failure(FailureCode.ABORTED, f"room {move.moved:016x} does not move: {problem}"))
