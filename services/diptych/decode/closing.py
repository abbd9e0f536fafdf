"""Rooms that were given up while prefill may still write into their pages: who must stop, and when it is asked again.

Rule: a room stays here until its writer says "no more writes", or provably can't write.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from diptych.decode.room import DecodeRoom
from diptych.engine.values.events import SendNote
from diptych.generation.output import FailureCode
from diptych.kvtransfer.notes import Abort

RETRY_S: Final = 1.0  # before a question that got no answer is asked again


class ClosingRooms:
    """`linked`, where it is asked for, are the peers that a note can reach."""

    def __init__(self) -> None:
        self._rooms: dict[int, DecodeRoom] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def add(self, room: DecodeRoom) -> None:
        """Take in a room whose prefill worker was told, if it could be."""
        self._rooms[room.request.room] = room

    def remove(self, room: DecodeRoom) -> None:
        del self._rooms[room.request.room]

    def peers(self) -> set[int]:
        """Return the writers."""
        return {room.peer for room in self._rooms.values()}

    def oldest_s(self) -> float | None:
        """Return when the room that is here longest was given up."""
        return min((room.given_up_s for room in self._rooms.values() if room.given_up_s is not None), default=None)

    def of_peer(self, peer: int) -> list[DecodeRoom]:
        return [room for room in self._rooms.values() if room.peer == peer]

    def ask_again(self, linked: Set[int], now_s: float) -> list[SendNote]:
        """Return what to ask now: an AbortAck may have been lost with a link that broke at prefill's end only."""
        notes: list[SendNote] = []
        for room in self._rooms.values():
            if room.asked_s is None:
                room.given_up_s = room.asked_s = now_s  # it was asked when it was given up, just now
            elif room.peer in linked and room.asked_s + RETRY_S <= now_s:
                room.asked_s = now_s
                notes.append(ask_to_stop(room))
        return notes

    def next_s(self, linked: Set[int]) -> float | None:
        """Return when `ask_again` has something to do."""
        asked = [room.asked_s for room in self._rooms.values() if room.peer in linked and room.asked_s is not None]
        return min(asked) + RETRY_S if asked else None


def ask_to_stop(room: DecodeRoom) -> SendNote:
    return SendNote(room.peer, Abort(room.request.room, FailureCode.ABORTED.value, "decode gave this room up"))
