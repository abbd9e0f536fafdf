"""Rooms whose KV had to give way, and how long they may wait for memory here."""

from __future__ import annotations

from diptych.decode.phases import Signal
from diptych.decode.room import DecodeRoom


class RetractedRooms:
    """Those that wait now; a room that resumes or ends is taken out."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._rooms: dict[int, DecodeRoom] = {}
        self.num_retracted = 0  # since start

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, room: DecodeRoom) -> bool:
        return room.request.room in self._rooms

    def add(self, room: DecodeRoom, now_s: float) -> None:
        self.num_retracted += 1
        room.on(Signal.RETRACTED)
        room.retracted_s = now_s
        self._rooms[room.request.room] = room

    def resume(self, room: DecodeRoom) -> None:
        """The room has pages again."""
        room.on(Signal.RESUMED)
        del self._rooms[room.request.room]

    def discard(self, room: DecodeRoom) -> None:
        """The room ends, whether it is here or not."""
        self._rooms.pop(room.request.room, None)

    def overdue(self, now_s: float) -> list[DecodeRoom]:
        """Return the rooms that have waited for too long."""
        return [room for room in self._rooms.values() if room.retracted_s + self._longest_s <= now_s]

    def next_s(self) -> float | None:
        """Return when the first is overdue."""
        return min((room.retracted_s + self._longest_s for room in self._rooms.values()), default=None)
