"""The legs that are open on one worker, by room. Rule: a leg leaves when its last output came, or with the session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from diptych.v1.worker_pb2 import LegOutput


class LegReceiver(Protocol):
    """Who started a leg and wants to know what becomes of it."""

    def receive(self, output: LegOutput) -> None: ...

    def lose(self, reason: str) -> None:
        """The worker is gone; nothing more will come."""
        ...


@dataclass(slots=True)
class _OpenLeg:
    receiver: LegReceiver
    prompt_len: int
    queued: bool = True  # nothing came back yet
    aborted: bool = False


class OpenLegs:
    """Delivers outputs to those who started the legs, and counts what is open."""

    def __init__(self) -> None:
        self._legs: dict[int, _OpenLeg] = {}
        self.queued_tokens = 0  # prompt tokens of legs that have not answered yet

    def __len__(self) -> int:
        return len(self._legs)

    def add(self, room: int, receiver: LegReceiver, prompt_len: int) -> None:
        assert room not in self._legs, "a room is used once"
        self._legs[room] = _OpenLeg(receiver, prompt_len)
        self.queued_tokens += prompt_len

    def mark_aborted(self, room: int) -> bool:
        """Return True if the worker has to be told: the leg is open and was not aborted before."""
        leg = self._legs.get(room)
        if leg is None or leg.aborted:
            return False
        leg.aborted = True
        return True

    def deliver(self, output: LegOutput) -> bool:
        """Return False for a room that is not open."""
        leg = self._legs.get(output.room)
        if leg is None:
            return False
        self._unqueue(leg)
        if output.finish_reason or output.HasField("error"):
            del self._legs[output.room]
        leg.receiver.receive(output)
        return True

    def lose_all(self, reason: str) -> None:
        legs, self._legs = self._legs, {}
        self.queued_tokens = 0
        for leg in legs.values():
            leg.receiver.lose(reason)

    def _unqueue(self, leg: _OpenLeg) -> None:
        if leg.queued:
            leg.queued = False
            self.queued_tokens -= leg.prompt_len
