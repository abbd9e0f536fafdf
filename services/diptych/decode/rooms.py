"""The open rooms of a decode worker and how they end: once each, with one answer to the router.

A room given up before its hand-off is verified leaves its pages in quarantine: until prefill has said "no more writes"
(`HandOff`, `Abort` or `AbortAck`) or provably can't write, and our transfer engine does not read them. Never earlier.

`RetractedRooms` are those whose KV had to give way: they may wait for memory here for a while. `ClosingRooms` were
given up while prefill may still write into their pages: it says who must stop, and when it is asked again. Rule: a room
stays there until its writer says "no more writes", or provably can't write.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Final

from diptych.decode.phases import Phase, Signal
from diptych.decode.room import DecodeRoom
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.deadlines import Deadlines
from diptych.engine.schedule.running import Running
from diptych.engine.schedule.waiting_queue import WaitingQueue
from diptych.engine.values.core_report import Holders
from diptych.engine.values.events import Crossing, Effect, Emit, SendNote
from diptych.generation.grammar import Matcher
from diptych.generation.output import Failure, FailureCode, Output
from diptych.kvtransfer.notes import Abort

JOINED = (Phase.RUNNING, Phase.RETRACTED)
VERIFIED = (*JOINED, Phase.MOVING)
_UNJOINED = (Phase.PREALLOCATING, Phase.IMPORTING, Phase.VERIFYING)  # prefill waits for word of them
_GIVEN_UP = (Phase.CLOSING, Phase.DISCARDING)
RETRY_S: Final = 1.0  # before a question that got no answer is asked again


class ClosingRooms:
    """`linked`, where it is asked for, are the peers that a note can reach."""

    def __init__(self) -> None:
        self.by_room: dict[int, DecodeRoom] = {}

    def __len__(self) -> int:
        return len(self.by_room)

    def add(self, room: DecodeRoom) -> None:
        """Take in a room whose prefill worker was told, if it could be."""
        self.by_room[room.request.room] = room

    def remove(self, room: DecodeRoom) -> None:
        del self.by_room[room.request.room]

    def peers(self) -> set[int]:
        """Return the writers."""
        return {room.peer for room in self.by_room.values()}

    def oldest_s(self) -> float | None:
        """Return when the room that is here longest was given up."""
        return min((room.given_up_s for room in self.by_room.values() if room.given_up_s is not None), default=None)

    def of_peer(self, peer: int) -> list[DecodeRoom]:
        return [room for room in self.by_room.values() if room.peer == peer]

    def ask_again(self, linked: Set[int], now_s: float) -> list[SendNote]:
        """Return what to ask now: an AbortAck may have been lost with a link that broke at prefill's end only."""
        notes: list[SendNote] = []
        for room in self.by_room.values():
            if room.asked_s is None:
                room.given_up_s = room.asked_s = now_s  # it was asked when it was given up, just now
            elif room.peer in linked and room.asked_s + RETRY_S <= now_s:
                room.asked_s = now_s
                notes.append(ask_to_stop(room))
        return notes

    def next_s(self, linked: Set[int]) -> float | None:
        """Return when `ask_again` has something to do."""
        asked = [room.asked_s for room in self.by_room.values() if room.peer in linked and room.asked_s is not None]
        return min(asked) + RETRY_S if asked else None


def ask_to_stop(room: DecodeRoom) -> SendNote:
    return SendNote(room.peer, Abort(room.request.room, FailureCode.ABORTED.value, "decode gave this room up"))


class RetractedRooms:
    """Those that wait now; a room that resumes or ends is taken out."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self.by_room: dict[int, DecodeRoom] = {}

    def __len__(self) -> int:
        return len(self.by_room)

    def __contains__(self, room: DecodeRoom) -> bool:
        return room.request.room in self.by_room

    def add(self, room: DecodeRoom, now_s: float) -> None:
        room.on(Signal.RETRACTED)
        room.retracted_s = now_s
        self.by_room[room.request.room] = room

    def resume(self, room: DecodeRoom) -> None:
        """The room has pages again."""
        room.on(Signal.RESUMED)
        del self.by_room[room.request.room]

    def discard(self, room: DecodeRoom) -> None:
        """The room ends, whether it is here or not."""
        self.by_room.pop(room.request.room, None)

    def overdue(self, now_s: float) -> list[DecodeRoom]:
        """Return the rooms that have waited for too long."""
        return [room for room in self.by_room.values() if room.retracted_s + self._longest_s <= now_s]

    def next_s(self) -> float | None:
        """Return when the first is overdue."""
        return min((room.retracted_s + self._longest_s for room in self.by_room.values()), default=None)


class Rooms:
    """Rooms by id. What ends here is answered here, in `effects`."""

    def __init__(
        self, cache: KvCache, waiting: WaitingQueue, running: Running, effects: list[Effect], retracted_s: float
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._effects = effects
        self.by_room: dict[int, DecodeRoom] = {}
        self._deadlines = Deadlines()
        self.retracted = RetractedRooms(retracted_s)
        self.closing = ClosingRooms()
        self.num_given_up = 0  # rooms in quarantine
        self.linked: set[int] = set()  # peers

    def __len__(self) -> int:
        return len(self.by_room)

    def __iter__(self) -> Iterator[DecodeRoom]:
        return iter(self.by_room.values())

    def __contains__(self, room_id: int) -> bool:
        return room_id in self.by_room

    def __getitem__(self, room_id: int) -> DecodeRoom:
        return self.by_room[room_id]

    def add(self, room: DecodeRoom) -> None:
        self.by_room[room.request.room] = room
        self._deadlines.add(room.request)
        if room.is_queued:
            self._waiting.add(room.request)

    def on_matcher(self, room: DecodeRoom, matcher: Matcher) -> None:
        """The room's grammar is compiled."""
        was_queued, room.request.matcher = room.is_queued, matcher
        if room.is_queued and not was_queued:
            self._waiting.add(room.request)

    def shared_with(self, peer: int, room_id: int) -> DecodeRoom | None:
        """Return the room that a note of `peer` is about."""
        room = self.by_room.get(room_id)
        return room if room is not None and room.peer == peer else None

    # ends

    def end(self, room: DecodeRoom, output: Output) -> None:
        """End a room whose pages nobody else writes; what is computed stays as a cached prefix."""
        if room.is_queued:
            self._waiting.remove(room.request)
        elif room.phase in JOINED:
            self._running.retire(room.request)
        elif room.phase not in (Phase.WAITING, Phase.MOVING):
            self._cache.drop(room.request)
        self._forget(room, output)

    def finish(self, room: DecodeRoom, output: Output, crossing: Crossing | None = None) -> None:
        """End a running room that has come to its own end, perhaps in the step in which it joined."""
        self._running.finish(room.request)
        self._forget(room, output, crossing)

    def drop(self, room: DecodeRoom, failure: Failure) -> None:
        """End a running room whose KV is not to be trusted."""
        self._running.drop(room.request)
        self._forget(room, Output(room.request.room, failure=failure))

    def fail(self, room: DecodeRoom, failure: Failure) -> None:
        """Answer the router now, tell prefill, and quarantine what prefill may still write."""
        if room.phase in _GIVEN_UP:
            return
        if room.peer in self.linked and room.phase in _UNJOINED:
            note = Abort(room.request.room, failure.peer_code, failure.message)
            self._effects.append(SendNote(room.peer, note))
        if room.phase in (Phase.IMPORTING, Phase.VERIFYING):
            self._quarantine(room, failure)
        else:
            self.end(room, Output(room.request.room, failure=failure))

    def prefill_gave_up(self, room: DecodeRoom, failure: Failure) -> None:
        """No write will come any more."""
        match room.phase:
            case Phase.CLOSING:
                self.writer_stopped(room)
            case Phase.VERIFYING:
                self._quarantine(room, failure)
            case Phase.IMPORTING:
                self._cache.finish_import(room.request)
                self.end(room, Output(room.request.room, failure=failure))
            case Phase.PREALLOCATING:
                self.end(room, Output(room.request.room, failure=failure))
            case _:
                pass  # the hand-off was accepted, or the room has ended for the client

    def writer_stopped(self, room: DecodeRoom) -> None:
        self.closing.remove(room)
        self._release(room, Signal.WRITER_STOPPED)

    def discard(self, room: DecodeRoom) -> None:
        """The pages of a room that was given up while it was verified are not read any more."""
        self._release(room, Signal.VERIFIED)

    def _quarantine(self, room: DecodeRoom, failure: Failure) -> None:
        room.on(Signal.GIVEN_UP)
        room.request.has_ended = True
        if room.phase is Phase.CLOSING:
            self.closing.add(room)
        self.num_given_up += 1
        self._cache.quarantine(room.request)
        self._effects.append(Emit(Output(room.request.room, failure=failure)))

    def _release(self, room: DecodeRoom, signal: Signal) -> None:
        room.on(signal)
        self.num_given_up -= 1
        self._cache.pool.release_quarantine(room.granted)
        del self.by_room[room.request.room]

    def _forget(self, room: DecodeRoom, output: Output, crossing: Crossing | None = None) -> None:
        room.on(Signal.ENDED)
        room.request.has_ended = True
        if self.retracted.by_room:
            self.retracted.discard(room)
        self._cache.sessions.waits_no_more(room.request)
        self._waiting.charge_output(room.request)
        del self.by_room[room.request.room]
        self._effects.append(Emit(output, crossing))

    # links and time

    def peer_up(self, peer: int) -> None:
        self.linked.add(peer)
        self._effects += map(ask_to_stop, self.closing.of_peer(peer))  # the link broke and came back

    def peer_down(self, peer: int, reason: str) -> None:
        self.linked.discard(peer)
        failure = Failure(FailureCode.PEER_LOST, f"lost the link to the prefill worker: {reason}")
        for room in [room for room in self if room.peer == peer]:
            if room.phase in (Phase.PREALLOCATING, Phase.IMPORTING):  # of the others we have all there is
                self.fail(room, failure)

    def writer_gone(self, peer: int) -> None:
        """The peer can't write any more."""
        for room in self.closing.of_peer(peer):
            self.writer_stopped(room)

    def expire(self, now_s: float) -> None:
        """End what has waited for too long; ask again who owes us an answer."""
        for request in self._deadlines.due(now_s):
            self.fail(self.by_room[request.room], Failure(FailureCode.DEADLINE, "the request's deadline passed"))
        if self.retracted.by_room:
            for room in self.retracted.overdue(now_s):
                self.fail(room, Failure(FailureCode.RETRACTED, "KV memory ran out, and did not come back in time"))
        if self.closing.by_room:
            self._effects += self.closing.ask_again(self.linked, now_s)

    def next_s(self) -> float | None:
        """Return when `expire` has something to do."""
        times = (self._deadlines.next_s(), self.closing.next_s(self.linked), self.retracted.next_s())
        return min((at_s for at_s in times if at_s is not None), default=None)

    def holders(self) -> Holders:
        """Return who claims pages."""

        def those(*phases: Phase) -> list[DecodeRoom]:
            return [room for room in self if room.phase in phases]

        return Holders(
            [*(room.request for room in those(Phase.RUNNING)), *self._running.leaving],
            [room.request for room in those(Phase.IMPORTING, Phase.VERIFYING)],
            [room.granted for room in those(*_GIVEN_UP)],
        )
