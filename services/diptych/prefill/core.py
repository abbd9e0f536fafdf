"""The scheduler core of a prefill worker: computes prompts and writes their KV into the pages that decode granted.

Order of what a peer sees of a room: page writes, then `HandOff`; or `Abort`/`AbortAck`, after which no write comes.
Our pages stay pinned until decode's `Ack`, or until no write of the room is in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from diptych.engine.admission import refuse, turn_away
from diptych.engine.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.batch_builder import build_batch
from diptych.engine.events import (
    AbortRoom,
    Effect,
    Emit,
    Event,
    GrammarFailed,
    GrammarReady,
    Load,
    NoteArrived,
    PeerDown,
    PeerUp,
    SendNote,
    Start,
    WriteDone,
    WritePages,
    WriterGone,
    compile_grammar,
)
from diptych.engine.extend_queue import ExtendQueue
from diptych.engine.finish import Finish
from diptych.engine.grammar.grammar import Matcher
from diptych.engine.kv_cache import KvCache
from diptych.engine.limits import Limits
from diptych.engine.output import Failure, FailureCode, Output
from diptych.engine.page_hash import prompt_hash
from diptych.engine.sampled import Sampled, collect_prompt_logprobs, refuse_token, sampled, take_prompt_logprobs
from diptych.engine.sampling_builder import build_sampling
from diptych.engine.step import new_step
from diptych.engine.stop import token_finish
from diptych.engine.waiting_queue import new_waiting_queue
from diptych.kvtransfer.notes import Abort, AbortAck, Ack, HandOff, Note, PagesReady
from diptych.kvtransfer.ownership import Pages
from diptych.prefill.phases import Phase, Signal
from diptych.prefill.rendezvous import Rendezvous
from diptych.prefill.room import PrefillRoom

RETRY_S: Final = 1.0  # before a note that got no answer is sent again

Digest = Callable[[Pages], int]


class PrefillCore:
    """Implements `SchedulerCore` for the prefill role."""

    can_overlap = False

    def __init__(self, cache: KvCache, limits: Limits, digest: Digest, page_nbytes: int) -> None:
        self._cache = cache
        self._limits = limits
        self._digest = digest  # of the bytes in our pages
        self._page_nbytes = page_nbytes
        self._max_tokens = min(limits.context_len, cache.max_request_tokens)
        self._waiting = new_waiting_queue(cache, limits.scheduling)
        self._queue = ExtendQueue(cache, self._waiting, max_batch_size=limits.max_requests)
        self._rooms: dict[int, PrefillRoom] = {}
        self._rendezvous = Rendezvous()
        self._step = new_step((), ())
        self._effects: list[Effect] = []

    # events

    def handle(self, event: Event, now_s: float) -> None:
        match event:
            case Start():
                self._start(event, now_s)
            case NoteArrived(peer, note):
                self._handle_note(peer, note, now_s)
            case AbortRoom(room_id, reason) if room_id in self._rooms:
                self._fail(self._rooms[room_id], Failure(FailureCode.ABORTED, reason))
            case WriteDone(room_id, error) if room_id in self._rooms:
                self._write_done(self._rooms[room_id], error)
            case PeerDown(peer, reason):
                self._peer_down(peer, reason)
            case GrammarReady(room_id, matcher) if room_id in self._rooms:
                self._take_matcher(self._rooms[room_id], matcher)
            case GrammarFailed(room_id, message) if room_id in self._rooms:
                self._fail(self._rooms[room_id], Failure(FailureCode.INVALID, message))
            case GrammarReady() | GrammarFailed():
                pass  # the room has ended
            case AbortRoom() | WriteDone():
                pass  # the room has ended: an Ack can overtake our own news that the write is complete
            case PeerUp() | WriterGone():
                pass  # nobody writes into a prefill pool

    def _start(self, event: Start, now_s: float) -> None:
        request = event.request
        known = request.room in self._rooms
        limits = self._limits
        failure = refuse(request, is_known=known, max_tokens=self._max_tokens, vocab_size=limits.vocab_size)
        failure = failure or turn_away(len(self._waiting), limits.scheduling.max_waiting)
        if failure:
            self._effects.append(Emit(Output(request.room, failure=failure)))
            return
        room = PrefillRoom(request, event.peer, arrival_s=now_s)
        self._rooms[request.room] = room
        if not request.is_ready:
            self._effects.append(compile_grammar(request))
        match self._rendezvous.take(event.peer, request.room):
            case PagesReady() as grant:
                self._take_grant(room, grant)
            case Abort(_, _, message):
                room.abort_ack_sent = True
                self._fail(room, Failure(FailureCode.ABORTED, f"decode gave up: {message}"))

    def _handle_note(self, peer: int, note: Note, now_s: float) -> None:
        room = self._rooms.get(note.room)
        if room is None or room.peer != peer:
            self._handle_early_note(peer, note, now_s)
            return
        match note:
            case PagesReady() if room.phase is Phase.BOOTSTRAPPING:
                self._take_grant(room, note)
            case Ack() if room.phase is Phase.TRANSFERRING:
                self._finish(room, now_s)
            case Abort(_, code, message):
                room.abort_ack_wanted = True
                self._fail(room, Failure(FailureCode(code or FailureCode.ABORTED.value), message))
            case _:
                pass  # a duplicate, or an answer to a room that is closing: its end is on the way

    def _handle_early_note(self, peer: int, note: Note, now_s: float) -> None:
        """A note for a room that we don't have: its Start comes later, or it has ended."""
        match note:
            case PagesReady():
                self._rendezvous.park(peer, note, now_s)
            case Abort():
                self._rendezvous.park(peer, note, now_s)
                self._effects.append(SendNote(peer, AbortAck(note.room)))
            case _:
                pass  # an Ack or AbortAck that crossed our own end of the room

    def _peer_down(self, peer: int, reason: str) -> None:
        self._rendezvous.forget(peer)
        for room in [room for room in self._rooms.values() if room.peer == peer]:
            room.peer_is_gone = True
            self._fail(room, Failure(FailureCode.PEER_LOST, f"lost the link to the decode worker: {reason}"))

    # steps

    def plan(self, now_s: float) -> ForwardBatch | None:
        chunks = self._queue.plan(now_s, self._limits.max_step_tokens, lambda request: 0)
        for chunk in chunks:
            room = self._rooms[chunk.request.room]
            if room.phase is Phase.WAITING:
                room.on(Signal.ADMITTED)
                room.first_step_s = now_s
                room.stats.cached_tokens = chunk.request.cached_len
                self._move_complete_pages(room)
        if not chunks:
            return None
        self._step = new_step((), chunks)
        batch = build_batch(self._step, self._cache.page_table, self._cache.page_size)
        self._step.launch()
        self._queue.launch(chunks)
        return batch

    def sampling(self) -> SamplingBatch:
        return build_sampling(self._step.sampled, self._limits.eos_ids)

    def commit(self, result: StepResult, now_s: float) -> None:
        collect_prompt_logprobs(self._step.chunks, result)
        for chunk in self._step.chunks:
            if not chunk.is_last:
                self._move_complete_pages(self._rooms[chunk.request.room])
        for row in sampled(self._step.sampled, result, range(len(self._step.sampled))):
            self._hand_off(row, now_s)

    def _move_complete_pages(self, room: PrefillRoom) -> None:
        """Move the full pages that decode lacks; the rest follows with the hand-off. Not while a step runs."""
        self._write(room, room.request.computed_len // self._cache.page_size, None)

    def _hand_off(self, row: Sampled, now_s: float) -> None:
        request, token_id, logprobs = row
        room = self._rooms[request.room]
        grant = room.grant
        assert grant is not None
        room.on(Signal.EXTENDED)
        failure = refuse_token(request, token_id)
        if failure is not None:
            self._fail(room, failure)
            return
        finish = request.grammar_finish or token_finish(token_id, 1, request.params, self._limits.eos_ids)
        room.first_token_s = now_s
        room.finish = finish or Finish.STOP
        granted = self._cache.pages_of(request)[room.first_page :].copy()
        room.stats.kv_digest = self._digest(granted)
        room.stats.pages_moved, room.stats.bytes_moved = len(granted), len(granted) * self._page_nbytes
        room.stats.queue_s = room.first_step_s - room.arrival_s
        room.stats.compute_s = now_s - room.first_step_s
        prompt_logprobs = take_prompt_logprobs(request)
        self._effects.append(
            Emit(Output(request.room, 0, (token_id,), None, None, room.stats, logprobs, prompt_logprobs))
        )
        note = HandOff(
            room=request.room,
            first_token=token_id,
            finish=finish.value if finish else None,
            num_pages=len(granted),
            kv_digest=room.stats.kv_digest,
            generations=grant.generations,
            cached_tokens=request.cached_len,
        )
        room.hand_off, room.asked_s = note, now_s
        self._write(room, self._cache.pages_for(request.prompt_len), note)

    def _write(self, room: PrefillRoom, end_page: int, note: HandOff | None) -> None:
        """Write pages `[room.next_page, end_page)` of the request to the peer, and then `note`."""
        if end_page <= room.next_page and note is None:
            return
        assert room.grant is not None
        src = self._cache.pages_of(room.request)[room.next_page : end_page].copy()
        dst = room.destination(room.next_page, end_page)
        self._cache.pool.pin(src)
        room.pinned.append(src)
        room.writes_in_flight += 1
        room.next_page = end_page
        self._effects.append(WritePages(room.request.room, room.peer, src, dst, note))

    # ends

    def _take_grant(self, room: PrefillRoom, grant: PagesReady) -> None:
        problem = room.refuse_grant(grant, self._cache.page_size, prompt_hash)
        if problem:
            self._fail(room, Failure(FailureCode.INVALID, problem))
            return
        room.take_grant(grant, self._cache.page_size)
        if room.request.is_ready:
            self._waiting.add(room.request)

    def _take_matcher(self, room: PrefillRoom, matcher: Matcher) -> None:
        room.request.matcher = matcher
        if room.phase is Phase.WAITING:
            self._waiting.add(room.request)

    def _write_done(self, room: PrefillRoom, error: str | None) -> None:
        room.writes_in_flight -= 1
        if error is not None:
            self._fail(room, Failure(FailureCode.TRANSFER_FAILED, f"writing KV pages failed: {error}"))
        elif room.phase is Phase.CLOSING:
            self._close_if_drained(room)

    def _finish(self, room: PrefillRoom, now_s: float) -> None:
        """Decode has everything: keep the prompt's KV as a cached prefix and forget the room."""
        room.on(Signal.ACKED)
        room.stats.transfer_s = now_s - room.first_token_s
        self._unpin(room)
        self._cache.retire(room.request)
        del self._rooms[room.request.room]
        self._effects.append(Emit(Output(room.request.room, 1, finish=room.finish, stats=room.stats)))

    def _fail(self, room: PrefillRoom, failure: Failure) -> None:
        """Answer the router now; give the pages back when no write is in flight."""
        if room.phase is not Phase.CLOSING:
            if room.phase in (Phase.WAITING, Phase.RUNNING) and room.request.is_ready:
                self._queue.remove(room.request)
            room.on(Signal.FAILED)
            room.failure = failure
            self._effects.append(Emit(Output(room.request.room, failure=failure)))
        self._close_if_drained(room)

    def _close_if_drained(self, room: PrefillRoom) -> None:
        if room.writes_in_flight > 0:
            return
        room.on(Signal.DRAINED)
        self._unpin(room)
        if room.request.node is not None:
            self._cache.drop(room.request)
        del self._rooms[room.request.room]
        note = room.farewell()
        if note is not None:
            self._effects.append(SendNote(room.peer, note))

    def _unpin(self, room: PrefillRoom) -> None:
        for pages in room.pinned:
            self._cache.pool.unpin(pages)

    # time and state

    def expire(self, now_s: float) -> None:
        for room in list(self._rooms.values()):
            deadline_s = room.request.deadline_s
            if room.phase is not Phase.CLOSING and deadline_s is not None and deadline_s <= now_s:
                self._fail(room, Failure(FailureCode.DEADLINE, "the request's deadline passed"))
            elif room.waits_for_ack and room.asked_s + RETRY_S <= now_s:
                self._ask_again(room, now_s)
        for peer, room_id in self._rendezvous.expire(now_s):
            reason = Abort(room_id, FailureCode.ABORTED.value, "the router never sent this room to prefill")
            self._effects.append(SendNote(peer, reason))

    def _ask_again(self, room: PrefillRoom, now_s: float) -> None:
        """The Ack may have been lost with a link that broke at decode's end only; decode answers as often as asked."""
        assert room.hand_off is not None
        room.asked_s = now_s
        self._effects.append(SendNote(room.peer, room.hand_off))

    def next_deadline_s(self) -> float | None:
        open_rooms = [room for room in self._rooms.values() if room.phase is not Phase.CLOSING]
        times = [room.request.deadline_s for room in open_rooms]
        times += [room.asked_s + RETRY_S for room in open_rooms if room.waits_for_ack]
        times.append(self._rendezvous.next_expiry_s())
        return min((at_s for at_s in times if at_s is not None), default=None)

    def suspects(self) -> set[int]:
        return set()  # nobody writes into this pool

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def load(self) -> Load:
        phases = [room.phase for room in self._rooms.values()]
        return Load(
            num_waiting=phases.count(Phase.BOOTSTRAPPING) + phases.count(Phase.WAITING),
            num_running=phases.count(Phase.RUNNING) + phases.count(Phase.TRANSFERRING),
            free_pages=self._cache.num_available,
            total_pages=self._cache.pool.capacity,
            waiting_tokens=sum(r.request.extend_len for r in self._rooms.values() if r.phase in _UNCOMPUTED),
        )

    @property
    def num_open_rooms(self) -> int:
        return len(self._rooms)

    @property
    def num_pages_received(self) -> int:
        return 0  # nobody writes into this pool

    @property
    def num_integrity_failures(self) -> int:
        return 0  # decode checks

    def page_counts(self) -> dict[str, int]:
        return self._cache.pool.counts()

    def check(self) -> list[str]:
        holders = [room.request for room in self._rooms.values() if room.request.node is not None]
        return self._cache.check(holders)


_UNCOMPUTED = (Phase.BOOTSTRAPPING, Phase.WAITING, Phase.RUNNING)
