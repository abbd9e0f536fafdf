"""Takes what prefill handed off: a room joins the running batch only when its pages are verified.

Every import ends here or in quarantine. After a `HandOff` that answers our grant prefill writes no more. Its digest is
that of all that prefill wrote for the room; that of what lies in our pages is computed on the transfer engine's thread.
"""

from __future__ import annotations

from diptych.decode.phases import Phase, Signal
from diptych.decode.room import DecodeRoom
from diptych.decode.rooms import Rooms
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.running import Drafter, Running
from diptych.engine.schedule.sampled import finish_of, refuse_token
from diptych.engine.values.core_report import CoreCounts
from diptych.engine.values.events import DigestPages, Effect, SendNote, UnpackPages
from diptych.generation.finish import Finish
from diptych.generation.output import Failure, FailureCode, Output
from diptych.kvtransfer.notes import Abort, Ack, HandOff


class Imports:
    """What it has to say goes to `effects`, and what it counts to `counts`."""

    def __init__(
        self,
        cache: KvCache,
        running: Running,
        rooms: Rooms,
        effects: list[Effect],
        counts: CoreCounts,
        *,
        page_nbytes: int,
        eos_ids: frozenset[int],
        drafter: Drafter | None,
    ) -> None:
        self._drafter = drafter
        self._cache = cache
        self._running = running
        self._rooms = rooms
        self._effects = effects
        self._counts = counts
        self._page_nbytes = page_nbytes
        self._eos_ids = eos_ids
        self.peers_in_parts: set[int] = set()  # linked ones whose pages land in parts

    def on_hand_off(self, room: DecodeRoom, note: HandOff, digest: int | None, now_s: float) -> None:
        """Begin an import; one whose request waits for its grammar is kept until `resume`."""
        room.hand_off, room.digest = note, digest
        room.is_in_parts = room.peer in self.peers_in_parts
        if room.request.is_ready:
            self.resume(room, now_s)

    def resume(self, room: DecodeRoom, now_s: float) -> None:
        """Verify the pages, if prefill has handed them off and wants so."""
        if room.hand_off is None:
            return
        problem = room.refuse_hand_off(room.hand_off)
        if problem:  # not an answer to our grant, so it doesn't prove that the writing has ended
            self._rooms.fail(room, Failure(FailureCode.TRANSFER_FAILED, problem))
            return
        room.on(Signal.HANDED_OFF)
        room.handed_off_s = now_s
        room.request.windows_whole_from = max(
            (each.first_token for each in room.hand_off.groups if each.kind == "window"), default=0
        )
        if room.digest is None:
            self._assemble(room, now_s)
        else:
            self._effects.append(DigestPages(room.request.room, room.granted))

    def on_digest(self, room: DecodeRoom, digest: int | None, now_s: float) -> None:
        """Compare what arrived with what was sent."""
        if room.phase is Phase.DISCARDING:
            self._rooms.discard(room)
        elif digest == room.digest:
            self._assemble(room, now_s)
        elif digest is None:
            self._reject(room, "the KV pages that arrived could not be read to be verified")
        else:
            self._counts.integrity_failures += 1
            self._reject(room, "KV pages arrived damaged: their digest is not prefill's")

    def on_unpacked(self, room: DecodeRoom, error: str | None, now_s: float) -> None:
        if room.phase is Phase.DISCARDING:
            self._rooms.discard(room)
        elif error is None:
            self._accept(room, now_s)
        else:
            self._reject(room, f"the KV pages that arrived could not be put together: {error}")

    def _assemble(self, room: DecodeRoom, now_s: float) -> None:
        """The pages are as prefill sent them: several of its ranks may each have sent a part."""
        of_tokens = room.granted[: len(room.granted) - self._cache.pages_per_state]  # a state comes as it is kept
        if room.is_in_parts and len(of_tokens):
            self._effects.append(UnpackPages(room.request.room, room.peer, of_tokens))
        else:
            self._accept(room, now_s)

    def _accept(self, room: DecodeRoom, now_s: float) -> None:
        room.on(Signal.VERIFIED)
        self._cache.finish_import(room.request)
        if self._drafter is not None and room.hand_off is not None:
            self._drafter.go_on_behind(room.request, room.hand_off.row)
        self._measure(room, now_s)
        self._effects.append(SendNote(room.peer, Ack(room.request.room)))
        self._join(room)

    def _reject(self, room: DecodeRoom, reason: str) -> None:
        self._cache.finish_import(room.request)
        failure = Failure(FailureCode.TRANSFER_FAILED, reason)
        self._effects.append(SendNote(room.peer, Abort(room.request.room, failure.code.value, failure.message)))
        self._rooms.end(room, Output(room.request.room, failure=failure))

    def _measure(self, room: DecodeRoom, now_s: float) -> None:
        room.verified_s = now_s
        room.stats.transfer_s = room.handed_off_s - room.granted_s
        room.stats.verify_s = now_s - room.handed_off_s
        room.stats.pages_moved = len(room.granted)
        room.stats.bytes_moved = len(room.granted) * self._page_nbytes
        room.stats.kv_digest = room.digest
        room.stats.cached_tokens = room.request.cached_len
        self._counts.pages_received += len(room.granted)

    def _join(self, room: DecodeRoom) -> None:
        """Join the running batch; no forward pass is needed, the KV is here."""
        request, note = room.request, room.hand_off
        assert note is not None
        request.computed_len = request.prompt_len
        self._cache.begin_from_import(request)
        request.append(note.first_token)
        self._running.join(request, room.handed_off_s)
        failure = refuse_token(request, note.first_token)
        if failure is not None:
            self._rooms.drop(room, failure)
            return
        self._cache.release_duplicates(self._cache.share(request, request.prompt_len))  # no step has read them yet
        finish = Finish(note.finish) if note.finish else finish_of(request, note.first_token, self._eos_ids)
        if finish is not None:
            self._rooms.end(room, Output(request.room, 1, finish=finish, stats=room.stats))
