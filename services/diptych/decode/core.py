"""The scheduler core of a decode worker: grants pages, verifies what prefill wrote into them, and decodes.

A granted page is IMPORTING until prefill's `HandOff` is verified. A room given up before that leaves its pages in
quarantine until prefill has said "no more writes" (`Abort` or `AbortAck`) or provably can't write: never earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from diptych.decode.closing import ClosingRooms, ask_to_stop
from diptych.decode.phases import Phase, Signal
from diptych.decode.room import DecodeRoom
from diptych.engine.admission import refuse, turn_away
from diptych.engine.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.deadlines import Deadlines
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
    WriterGone,
    compile_grammar,
)
from diptych.engine.finish import Finish
from diptych.engine.grammar.grammar import Matcher
from diptych.engine.kv_cache import KvCache
from diptych.engine.limits import Limits
from diptych.engine.output import Failure, FailureCode, Output
from diptych.engine.page_hash import prompt_hash
from diptych.engine.request import Request
from diptych.engine.running import Running
from diptych.engine.sampled import Sampled, finish_of, refuse_token, sampled, take_plain
from diptych.engine.stop import end_ids
from diptych.engine.waiting_queue import new_waiting_queue
from diptych.kvtransfer.notes import Abort, AbortAck, Ack, HandOff, Note, PagesReady
from diptych.kvtransfer.ownership import Pages

RETRACTED_S: Final = 30.0  # that a retracted request waits for memory here, before the router tries another pair

Digest = Callable[[Pages], int]


class DecodeCore:
    """Implements `SchedulerCore` for the decode role."""

    can_overlap = True

    def __init__(self, cache: KvCache, limits: Limits, digest: Digest, page_nbytes: int) -> None:
        self._cache = cache
        self._limits = limits
        self._digest = digest  # of the bytes in our pages
        self._page_nbytes = page_nbytes
        self._max_tokens = min(limits.context_len, cache.max_request_tokens)
        self._retracted = new_waiting_queue(cache, limits.scheduling)
        self._running = Running(cache, limits, self._retracted, self._note_retraction)
        self._rooms: dict[int, DecodeRoom] = {}
        self._waiting = new_waiting_queue(cache, limits.scheduling)  # PREALLOCATING
        self._retracted_rooms: dict[int, DecodeRoom] = {}
        self._closing = ClosingRooms()
        self._deadlines = Deadlines()
        self._linked: set[int] = set()
        self._effects: list[Effect] = []
        self.num_retracted = 0  # since start
        self._now_s = 0.0  # of the step that is planned
        self._num_pages_received = 0
        self._num_integrity_failures = 0

    # events

    def handle(self, event: Event, now_s: float) -> None:
        match event:
            case Start():
                self._start(event, now_s)
            case NoteArrived(peer, note):
                self._handle_note(peer, note, now_s)
            case AbortRoom(room_id, reason) if room_id in self._rooms:
                self._fail(self._rooms[room_id], Failure(FailureCode.ABORTED, reason))
            case PeerUp(peer):
                self._peer_up(peer)
            case PeerDown(peer, reason):
                self._peer_down(peer, reason)
            case WriterGone(peer):
                for room in self._closing.of_peer(peer):
                    self._writer_stopped(room)
            case GrammarReady(room_id, matcher) if room_id in self._rooms:
                self._take_matcher(self._rooms[room_id], matcher, now_s)
            case GrammarFailed(room_id, message) if room_id in self._rooms:
                self._fail(self._rooms[room_id], Failure(FailureCode.INVALID, message))
            case WriteDone() | AbortRoom() | GrammarReady() | GrammarFailed():
                pass  # decode writes no pages; an unknown room has ended
        self._grant_pages(now_s)

    def _start(self, event: Start, now_s: float) -> None:
        request = event.request
        known = request.room in self._rooms
        limits = self._limits
        failure = refuse(request, is_known=known, max_tokens=self._max_tokens, vocab_size=limits.vocab_size)
        failure = failure or turn_away(len(self._waiting), limits.scheduling.max_waiting)
        if failure is None and event.peer not in self._linked:
            failure = Failure(FailureCode.PEER_LOST, f"no link to prefill worker {event.peer:016x}")
        if failure:
            self._effects.append(Emit(Output(request.room, failure=failure)))
            return
        request.max_len = min(request.max_len, self._max_tokens)
        request.end_ids = end_ids(request.params, limits.eos_ids)
        request.prompt_logprobs = None  # prefill reports them
        room = DecodeRoom(request, event.peer, arrival_s=now_s)
        self._rooms[request.room] = room
        self._waiting.add(request)
        self._deadlines.add(request)
        if not request.is_ready:  # pages are granted meanwhile: only the hand-off waits
            self._effects.append(compile_grammar(request))

    def _take_matcher(self, room: DecodeRoom, matcher: Matcher, now_s: float) -> None:
        room.request.matcher = matcher
        if room.early_hand_off is not None and room.phase is Phase.IMPORTING:
            self._take_hand_off(room, room.early_hand_off, now_s)

    def _handle_note(self, peer: int, note: Note, now_s: float) -> None:
        room = self._rooms.get(note.room)
        if room is None or room.peer != peer:
            self._handle_late_note(peer, note)
            return
        match note:
            case HandOff() if room.phase in _JOINED:
                self._effects.append(SendNote(peer, Ack(note.room)))
            case HandOff() if room.phase is Phase.IMPORTING and not room.request.is_ready:
                room.early_hand_off = note
            case HandOff() if room.phase is Phase.IMPORTING:
                self._take_hand_off(room, note, now_s)
            case Abort(_, code, message) if room.phase not in _JOINED:
                self._prefill_gave_up(room, Failure(FailureCode(code or FailureCode.ABORTED.value), message))
            case AbortAck() if room.phase is Phase.CLOSING:
                self._writer_stopped(room)
            case _:
                pass  # a duplicate, or a hand-off that crossed our abort: its AbortAck follows

    def _handle_late_note(self, peer: int, note: Note) -> None:
        """A note for a room that has ended here: prefill may have missed our last word."""
        if isinstance(note, HandOff):
            self._effects.append(SendNote(peer, Ack(note.room)))  # nobody needs prefill's pages any more

    def _peer_up(self, peer: int) -> None:
        self._linked.add(peer)
        self._effects += map(ask_to_stop, self._closing.of_peer(peer))  # the link broke and came back

    def _peer_down(self, peer: int, reason: str) -> None:
        self._linked.discard(peer)
        failure = Failure(FailureCode.PEER_LOST, f"lost the link to the prefill worker: {reason}")
        for room in [room for room in self._rooms.values() if room.peer == peer]:
            if room.phase in (Phase.PREALLOCATING, Phase.IMPORTING):
                self._fail(room, failure)

    # the hand-off

    def _grant_pages(self, now_s: float) -> None:
        """Grant pages to waiting rooms; those retracted go first."""
        while self._waiting and self._cache.has_row and not self._retracted:
            request = self._waiting.peek(now_s)
            importing = [room.request for room in self._rooms.values() if room.phase is Phase.IMPORTING]
            if not self._cache.admit(request, spare_pages=self._running.spare_pages(request, importing)):
                return
            self._waiting.take(request)
            self._grant(self._rooms[request.room], now_s)

    def _grant(self, room: DecodeRoom, now_s: float) -> None:
        request = room.request
        room.on(Signal.GRANTED)
        room.granted = self._cache.begin_import(request)
        room.generations = tuple(self._cache.pool.generations(room.granted).tolist())
        room.granted_s = now_s
        room.stats.queue_s = now_s - room.arrival_s
        note = PagesReady(
            room=request.room,
            pages=tuple(room.granted.tolist()),
            generations=room.generations,
            cached_prefix_len=request.cached_len,
            num_prompt_tokens=request.prompt_len,
            prompt_hash=prompt_hash(request.tokens[: request.prompt_len], request.extra_key),
        )
        self._effects.append(SendNote(room.peer, note))

    def _take_hand_off(self, room: DecodeRoom, note: HandOff, now_s: float) -> None:
        problem = room.refuse_hand_off(note)
        if problem:  # not an answer to our grant, so it doesn't prove that the writing has ended
            self._fail(room, Failure(FailureCode.TRANSFER_FAILED, problem))
            return
        self._cache.finish_import(room.request)
        if self._is_damaged(room, note):
            self._reject_damage(room)
            return
        room.on(Signal.HANDED_OFF)
        room.handed_off_s = now_s
        room.stats.transfer_s = now_s - room.granted_s
        room.stats.pages_moved = len(room.granted)
        room.stats.bytes_moved = len(room.granted) * self._page_nbytes
        room.stats.kv_digest = note.kv_digest
        room.stats.cached_tokens = room.request.cached_len
        self._num_pages_received += len(room.granted)
        self._effects.append(SendNote(room.peer, Ack(room.request.room)))
        self._join(room, note)

    def _is_damaged(self, room: DecodeRoom, note: HandOff) -> bool:
        return self._digest(room.granted) != note.kv_digest

    def _reject_damage(self, room: DecodeRoom) -> None:
        self._num_integrity_failures += 1
        failure = Failure(FailureCode.TRANSFER_FAILED, "KV pages arrived damaged: their digest is not prefill's")
        self._effects.append(SendNote(room.peer, Abort(room.request.room, failure.code.value, failure.message)))
        self._end(room, Output(room.request.room, failure=failure))

    def _join(self, room: DecodeRoom, note: HandOff) -> None:
        """Join the running batch; no forward pass is needed, the KV is here."""
        request = room.request
        request.computed_len = request.prompt_len
        request.append(note.first_token)
        self._running.join(request)
        failure = refuse_token(request, note.first_token)
        if failure is not None:
            self._drop(room, failure)
            return
        finish = Finish(note.finish) if note.finish else finish_of(request, note.first_token, self._limits.eos_ids)
        if finish is not None:
            self._end(room, Output(request.room, 1, finish=finish, stats=room.stats))

    # steps

    def plan(self, now_s: float) -> ForwardBatch | None:
        self._now_s = now_s
        step = self._running.mixed_step(now_s)
        if step is None:
            return None
        for chunk in step.chunks:
            self._resume(self._rooms[chunk.request.room])
        return self._running.launch(step)

    def sampling(self) -> SamplingBatch:
        return self._running.sampling()

    def commit(self, result: StepResult, now_s: float) -> None:
        requests = self._running.commit().sampled
        tokens, others = take_plain(requests, result)
        if tokens.rooms:
            self._effects.append(tokens)
        for row in sampled(requests, result, others):
            self._take_token(row, now_s)
        self._grant_pages(now_s)

    def _note_retraction(self, request: Request) -> None:
        """Out of KV memory: the request waits here, and later computes again what is not cached any more."""
        self.num_retracted += 1
        room = self._rooms[request.room]
        room.on(Signal.RETRACTED)
        room.retracted_s = self._now_s
        self._retracted_rooms[request.room] = room

    def _resume(self, room: DecodeRoom) -> None:
        if room.phase is Phase.RETRACTED:
            room.on(Signal.RESUMED)
            del self._retracted_rooms[room.request.room]

    def _take_token(self, row: Sampled, now_s: float) -> None:
        request, token_id, logprobs = row
        room = self._rooms[request.room]
        failure = refuse_token(request, token_id)
        if failure is not None:
            self._drop(room, failure)
            return
        index = request.num_output_tokens
        request.append(token_id)
        if index == 1:
            room.stats.join_s = now_s - room.handed_off_s
        finish = finish_of(request, token_id, self._limits.eos_ids)
        if finish is None:
            self._effects.append(Emit(Output(request.room, index, (token_id,), logprobs=logprobs)))
        else:
            self._running.finish(request)
            self._forget(room, Output(request.room, index, (token_id,), finish, None, room.stats, logprobs))

    # ends

    def _end(self, room: DecodeRoom, output: Output) -> None:
        """End a room whose pages nobody else writes; what is computed stays as a cached prefix."""
        if room.phase is Phase.PREALLOCATING:
            self._waiting.remove(room.request)
        elif room.phase in _JOINED:
            self._running.retire(room.request)
        else:
            self._cache.drop(room.request)
        self._forget(room, output)

    def _drop(self, room: DecodeRoom, failure: Failure) -> None:
        """End a running room whose KV is not to be trusted."""
        self._running.drop(room.request)
        self._forget(room, Output(room.request.room, failure=failure))

    def _forget(self, room: DecodeRoom, output: Output) -> None:
        room.on(Signal.ENDED)
        room.request.has_ended = True
        self._retracted_rooms.pop(room.request.room, None)
        self._waiting.charge_output(room.request)
        del self._rooms[room.request.room]
        self._effects.append(Emit(output))

    def _fail(self, room: DecodeRoom, failure: Failure) -> None:
        """Answer the router now, tell prefill, and quarantine what prefill may still write."""
        if room.phase is Phase.CLOSING:
            return
        if room.peer in self._linked and room.phase in (Phase.PREALLOCATING, Phase.IMPORTING):
            note = Abort(room.request.room, failure.code.value, failure.message)
            self._effects.append(SendNote(room.peer, note))
        output = Output(room.request.room, failure=failure)
        if room.phase is not Phase.IMPORTING:
            self._end(room, output)
            return
        room.on(Signal.GIVEN_UP)
        room.request.has_ended = True
        self._closing.add(room)
        self._cache.quarantine(room.request)
        self._effects.append(Emit(output))

    def _prefill_gave_up(self, room: DecodeRoom, failure: Failure) -> None:
        """Prefill's Abort: no write will come any more."""
        if room.phase is Phase.CLOSING:
            self._writer_stopped(room)
            return
        if room.phase is Phase.IMPORTING:
            self._cache.finish_import(room.request)
        self._end(room, Output(room.request.room, failure=failure))

    def _writer_stopped(self, room: DecodeRoom) -> None:
        room.on(Signal.WRITER_STOPPED)
        self._cache.pool.release_quarantine(room.granted)
        self._closing.remove(room)
        del self._rooms[room.request.room]

    # time and state

    def expire(self, now_s: float) -> None:
        for request in self._deadlines.due(now_s):
            self._fail(self._rooms[request.room], Failure(FailureCode.DEADLINE, "the request's deadline passed"))
        for room in list(self._retracted_rooms.values()):
            if room.retracted_s + RETRACTED_S <= now_s:
                self._fail(room, Failure(FailureCode.RETRACTED, "KV memory ran out, and did not come back in time"))
        self._effects += self._closing.ask_again(self._linked, now_s)
        self._grant_pages(now_s)

    def next_deadline_s(self) -> float | None:
        times = [self._deadlines.next_s(), self._closing.next_s(self._linked)]
        times += [room.retracted_s + RETRACTED_S for room in self._retracted_rooms.values()]
        return min((at_s for at_s in times if at_s is not None), default=None)

    def suspects(self) -> set[int]:
        """Peers without a link whose writes our quarantine still waits out."""
        return self._closing.peers() - self._linked

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def load(self) -> Load:
        return Load(
            num_waiting=len(self._rooms) - len(self._running) - len(self._closing),
            num_running=len(self._running),
            free_pages=self._cache.num_available,
            total_pages=self._cache.pool.capacity,
            waiting_tokens=self._waiting.num_tokens + self._running.waiting_tokens,
        )

    @property
    def num_open_rooms(self) -> int:
        return len(self._rooms)

    @property
    def num_pages_received(self) -> int:
        return self._num_pages_received

    @property
    def num_integrity_failures(self) -> int:
        return self._num_integrity_failures

    def page_counts(self) -> dict[str, int]:
        return self._cache.pool.counts()

    def check(self) -> list[str]:
        by_phase: dict[Phase, list[DecodeRoom]] = {phase: [] for phase in Phase}
        for room in self._rooms.values():
            by_phase[room.phase].append(room)
        return self._cache.check(
            [*(room.request for room in by_phase[Phase.RUNNING]), *self._running.leaving],
            importing=[room.request for room in by_phase[Phase.IMPORTING]],
            quarantined=[room.granted for room in by_phase[Phase.CLOSING]],
        )


_JOINED = (Phase.RUNNING, Phase.RETRACTED)
