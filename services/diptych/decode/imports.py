"""Takes what prefill handed off: a room joins the running batch only when its pages are verified.

Every import ends here or in quarantine. After a `HandOff` that answers our grant prefill writes no more.
"""

from __future__ import annotations

from collections.abc import Callable

from diptych.decode.phases import Signal
from diptych.decode.room import DecodeRoom
from diptych.decode.rooms import Rooms
from diptych.engine.events import Effect, SendNote
from diptych.engine.finish import Finish
from diptych.engine.kv_cache import KvCache
from diptych.engine.output import Failure, FailureCode, Output
from diptych.engine.running import Running
from diptych.engine.sampled import finish_of, refuse_token
from diptych.kvtransfer.notes import Abort, Ack, HandOff
from diptych.kvtransfer.ownership import Pages

Digest = Callable[[Pages], int]


class Imports:
    """What it has to say goes to `effects`."""

    def __init__(
        self,
        cache: KvCache,
        running: Running,
        rooms: Rooms,
        effects: list[Effect],
        *,
        digest: Digest,
        page_nbytes: int,
        eos_ids: frozenset[int],
    ) -> None:
        self._cache = cache
        self._running = running
        self._rooms = rooms
        self._effects = effects
        self._digest = digest  # of the bytes in our pages
        self._page_nbytes = page_nbytes
        self._eos_ids = eos_ids
        self.num_pages_received = 0  # and verified, since start
        self.num_integrity_failures = 0

    def take(self, room: DecodeRoom, note: HandOff, now_s: float) -> None:
        problem = room.refuse_hand_off(note)
        if problem:  # not an answer to our grant, so it doesn't prove that the writing has ended
            self._rooms.fail(room, Failure(FailureCode.TRANSFER_FAILED, problem))
            return
        self._cache.finish_import(room.request)
        if self._is_damaged(room, note):
            self._reject_damage(room)
            return
        room.on(Signal.HANDED_OFF)
        self._measure(room, note, now_s)
        self._effects.append(SendNote(room.peer, Ack(room.request.room)))
        self._join(room, note)

    def _is_damaged(self, room: DecodeRoom, note: HandOff) -> bool:
        return self._digest(room.granted) != note.kv_digest

    def _reject_damage(self, room: DecodeRoom) -> None:
        self.num_integrity_failures += 1
        failure = Failure(FailureCode.TRANSFER_FAILED, "KV pages arrived damaged: their digest is not prefill's")
        self._effects.append(SendNote(room.peer, Abort(room.request.room, failure.code.value, failure.message)))
        self._rooms.end(room, Output(room.request.room, failure=failure))

    def _measure(self, room: DecodeRoom, note: HandOff, now_s: float) -> None:
        room.handed_off_s = now_s
        room.stats.transfer_s = now_s - room.granted_s
        room.stats.pages_moved = len(room.granted)
        room.stats.bytes_moved = len(room.granted) * self._page_nbytes
        room.stats.kv_digest = note.kv_digest
        room.stats.cached_tokens = room.request.cached_len
        self.num_pages_received += len(room.granted)

    def _join(self, room: DecodeRoom, note: HandOff) -> None:
        """Join the running batch; no forward pass is needed, the KV is here."""
        request = room.request
        request.computed_len = request.prompt_len
        request.append(note.first_token)
        self._running.join(request)
        failure = refuse_token(request, note.first_token)
        if failure is not None:
            self._rooms.drop(room, failure)
            return
        finish = Finish(note.finish) if note.finish else finish_of(request, note.first_token, self._eos_ids)
        if finish is not None:
            self._rooms.end(room, Output(request.room, 1, finish=finish, stats=room.stats))
