"""Notes that came before the router's Start of their room: kept a while, bounded, and never forgotten silently."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from diptych.engine.values.events import SendNote
from diptych.kvtransfer.notes import Abort, AbortAck, Note, PagesReady

EarlyNote = PagesReady | Abort

MAX_PARKED_PAGES: Final = 1 << 22  # of all grants; an abort counts as one. Beyond it the oldest notes expire early
KEEP_S: Final = 10.0  # the two legs of a room arrive milliseconds apart; the rest is a router that died between them


@dataclass(frozen=True, slots=True)
class _Parked:
    note: EarlyNote
    expiry_s: float


class Rendezvous:
    """Early notes by (peer, room). An Abort overtakes and replaces a grant, as the room's tombstone."""

    def __init__(self) -> None:
        self.parked: OrderedDict[tuple[int, int], _Parked] = OrderedDict()  # in order of expiry
        self._num_pages = 0

    def receive(self, peer: int, note: Note, now_s: float) -> list[SendNote]:
        """Keep a note for a room that we don't have: its Start comes later, or it has ended. Return the answer."""
        match note:
            case PagesReady():
                self.park(peer, note, now_s)
            case Abort(room, _, _):
                self.park(peer, note, now_s)
                return [SendNote(peer, AbortAck(room))]
            case _:
                pass  # an Ack or AbortAck that crossed our own end of the room
        return []

    def park(self, peer: int, note: EarlyNote, now_s: float) -> None:
        """Keep `note` until its room starts. A grant after the abort of its room stays aborted."""
        key = (peer, note.room)
        before = self.parked.get(key)
        if before is None or not isinstance(before.note, Abort):
            self._drop(key)
            self.parked[key] = _Parked(note, now_s + KEEP_S)
            self._num_pages += _size(note)

    def pop(self, peer: int, room: int) -> EarlyNote | None:
        return self._drop((peer, room))

    def forget(self, peer: int) -> None:
        """Drop what a lost peer sent."""
        for key in [key for key in self.parked if key[0] == peer]:
            self._drop(key)

    def expire(self, now_s: float) -> list[tuple[int, int]]:
        """Drop what is too old; return (peer, room) of the grants among it: they must be told."""
        unanswered: list[tuple[int, int]] = []
        while self.parked:
            key, parked = next(iter(self.parked.items()))
            if parked.expiry_s > now_s and self._num_pages <= MAX_PARKED_PAGES:
                break
            self._drop(key)
            if isinstance(parked.note, PagesReady):
                unanswered.append(key)
        return unanswered

    def next_expiry_s(self) -> float | None:
        return next(iter(self.parked.values())).expiry_s if self.parked else None

    def _drop(self, key: tuple[int, int]) -> EarlyNote | None:
        parked = self.parked.pop(key, None)
        if parked is None:
            return None
        self._num_pages -= _size(parked.note)
        return parked.note


def _size(note: EarlyNote) -> int:
    return 1 + len(note.pages) if isinstance(note, PagesReady) else 1
