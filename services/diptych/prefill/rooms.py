"""The open rooms of a prefill worker and how they end.

Our pages stay pinned until no write of the room is in flight, and decode has sent its `Ack` or the room has failed.
Only then does decode hear "no more writes", and the room is forgotten. A room that decode has acknowledged can't fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.extend_queue import ExtendQueue
from diptych.engine.values.events import Effect, Emit
from diptych.generation.output import LEAVING, Failure, FailureCode, Output
from diptych.prefill.phases import Phase, Signal
from diptych.prefill.room import PrefillRoom
from diptych.prefill.sending import Sender

RETRY_S: Final = 1.0  # before a note that got no answer is sent again
GRANT_S: Final = 0.5  # that a request which runs elsewhere meanwhile stands still for want of pages at its new place


class Rooms:
    """Rooms by id. What ends here is answered here, in `effects`."""

    def __init__(
        self, cache: KvCache, queue: ExtendQueue, sender: Sender, effects: list[Effect], ack_timeout_s: float
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._sender = sender
        self._ack_timeout_s = ack_timeout_s
        self._effects = effects
        self.by_room: dict[int, PrefillRoom] = {}
        self._returned: list[PrefillRoom] = []

    def __len__(self) -> int:
        return len(self.by_room)

    def __iter__(self) -> Iterator[PrefillRoom]:
        return iter(self.by_room.values())

    def __contains__(self, room_id: int) -> bool:
        return room_id in self.by_room

    def __getitem__(self, room_id: int) -> PrefillRoom:
        return self.by_room[room_id]

    def add(self, room: PrefillRoom) -> None:
        self.by_room[room.request.room] = room

    def shared_with(self, peer: int, room_id: int) -> PrefillRoom | None:
        """Return the room that a note of `peer` is about."""
        room = self.by_room.get(room_id)
        return room if room is not None and room.peer == peer else None

    # ends

    def acknowledge(self, room: PrefillRoom, now_s: float) -> None:
        """Decode has verified everything, perhaps before we hear that our last write is complete."""
        room.on(Signal.ACKED)
        room.stats.transfer_s = now_s - room.first_token_s  # with what was left of a step of ours
        room.stats.added_ttft_s = room.stats.transfer_s if room.sending_s is None else room.sending_s
        self._settle_if_drained(room)

    def fail(self, room: PrefillRoom, failure: Failure) -> None:
        """Answer the router now; give the pages back when no write is in flight."""
        if room.phase is Phase.SETTLING:
            return
        if room.phase is not Phase.CLOSING:
            if room.phase in (Phase.WAITING, Phase.RUNNING) and room.request.is_ready:
                self._queue.remove(room.request)
            room.on(Signal.FAILED)
            room.request.has_ended = True
            self._cache.sessions.waits_no_more(room.request)
            room.failure = failure
            self._effects.append(Emit(Output(room.request.room, failure=failure)))
        self._close_if_drained(room)

    def hand_back(self, room: PrefillRoom) -> None:
        """Give a room up for another worker to do. What is handed off stays: decode has it, or is about to."""
        if room.phase is not Phase.TRANSFERRING:
            self.fail(room, LEAVING)

    def lose(self, peer: int, reason: str) -> None:
        """Fail every room of a peer whose link is gone."""
        for room in [room for room in self if room.peer == peer]:
            room.peer_is_gone = True
            self.fail(room, Failure(FailureCode.PEER_LOST, f"lost the link to the decode worker: {reason}"))

    def write_done(self, room: PrefillRoom, error: str | None, digest: int | None) -> None:
        room.count_write(error, digest)
        if room.phase is Phase.SETTLING:
            self._settle_if_drained(room)
        elif error is not None:
            self.fail(room, Failure(FailureCode.TRANSFER_FAILED, f"writing KV pages failed: {error}"))
        elif room.phase is Phase.CLOSING:
            self._close_if_drained(room)

    def pop_returned(self) -> list[PrefillRoom]:
        """Return rooms of moved requests that have ended; the caller takes their pages."""
        returned, self._returned = self._returned, []
        return returned

    def _settle_if_drained(self, room: PrefillRoom) -> None:
        """Keep the prompt's KV as a cached prefix and forget the room."""
        if room.writes_in_flight > 0:
            return
        room.on(Signal.DRAINED)
        room.stats.kv_digest = room.digest
        self._sender.release(room)
        if room.moved:
            self._returned.append(room)
        else:
            self._cache.retire(room.request)
        del self.by_room[room.request.room]
        self._effects.append(Emit(Output(room.request.room, 1, finish=room.finish, stats=room.stats)))

    def _close_if_drained(self, room: PrefillRoom) -> None:
        if room.writes_in_flight > 0:
            return
        room.on(Signal.DRAINED)
        self._sender.release(room)
        if room.moved:
            self._returned.append(room)
        elif room.request.node is not None:
            self._cache.drop(room.request)
        del self.by_room[room.request.room]
        note = room.farewell()
        if note is not None:
            self._effects.append(note)

    # time

    def expire(self, now_s: float) -> None:
        """End rooms whose deadline has passed; ask again where decode owes an answer."""
        for room in [room for room in self if room.phase not in _ENDED]:
            if room.request.life.deadline_s <= now_s:
                self.fail(room, Failure(FailureCode.DEADLINE, "the request's deadline passed"))
            elif room.stands_still and room.arrival_s + GRANT_S <= now_s:
                words = f"its new worker granted no pages within {GRANT_S:g} s"
                self.fail(room, Failure(FailureCode.TRANSFER_FAILED, words))
            elif room.waits_for_ack and room.hand_off_s + self._ack_timeout_s <= now_s:
                words = f"decode did not acknowledge the KV within {self._ack_timeout_s:g} s"
                self.fail(room, Failure(FailureCode.TRANSFER_FAILED, words))
            elif room.waits_for_ack and room.asked_s + RETRY_S <= now_s:
                self._sender.ask_again(room, now_s)

    def next_s(self) -> float | None:
        """Return when `expire` has something to do."""
        waiting = [room for room in self if room.phase not in _ENDED]
        deadlines = (room.request.life.deadline_s for room in waiting)
        times = [deadline_s for deadline_s in deadlines if deadline_s < math.inf]
        for room in waiting:
            if room.stands_still:
                times.append(room.arrival_s + GRANT_S)
            if room.waits_for_ack:
                times += [room.asked_s + RETRY_S, room.hand_off_s + self._ack_timeout_s]
        return min(times, default=None)


_ENDED = (Phase.SETTLING, Phase.CLOSING)  # for the client
