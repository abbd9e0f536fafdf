"""The scheduler core of a decode worker: grants pages, verifies what prefill wrote into them, and decodes.

`Grants` opens pages to prefill, `Imports` takes them back verified, and `Rooms` ends what began here.
"""

from __future__ import annotations

from diptych.decode.grants import Grants
from diptych.decode.imports import Imports
from diptych.decode.phases import Phase
from diptych.decode.room import DecodeRoom
from diptych.decode.rooms import JOINED, Rooms
from diptych.engine.admission import refuse, turn_away
from diptych.engine.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.events import (
    AbortRoom,
    Effect,
    Emit,
    Event,
    GrammarFailed,
    GrammarReady,
    Load,
    NoteArrived,
    PagesDigested,
    PagesUnpacked,
    PeerDown,
    PeerUp,
    SendNote,
    Start,
    WriteDone,
    WriterGone,
    compile_grammar,
)
from diptych.engine.grammar.grammar import Matcher
from diptych.engine.kv_cache import KvCache
from diptych.engine.limits import Limits
from diptych.engine.output import Failure, FailureCode, Output
from diptych.engine.request import Request
from diptych.engine.running import Running
from diptych.engine.sampled import Sampled, finish_of, refuse_token, sampled, take_plain
from diptych.engine.stop import end_ids
from diptych.engine.waiting_queue import new_waiting_queue
from diptych.kvtransfer.notes import Abort, AbortAck, Ack, HandOff, Note


class DecodeCore:
    """Implements `SchedulerCore` for the decode role."""

    can_overlap = True

    def __init__(self, cache: KvCache, limits: Limits, page_nbytes: int) -> None:
        self._cache = cache
        self._limits = limits
        self._max_tokens = min(limits.context_len, cache.max_request_tokens)
        self._retracted = new_waiting_queue(cache, limits.scheduling)
        self._running = Running(cache, limits, self._retracted, self._note_retraction)
        self._waiting = new_waiting_queue(cache, limits.scheduling)  # PREALLOCATING
        self._effects: list[Effect] = []
        self._rooms = Rooms(cache, self._waiting, self._running, self._effects)
        self._grants = Grants(cache, self._waiting, self._running, self._rooms)
        self._imports = Imports(
            cache,
            self._running,
            self._rooms,
            self._effects,
            page_nbytes=page_nbytes,
            eos_ids=limits.eos_ids,
        )
        self._now_s = 0.0  # of the step that is planned

    # events

    def handle(self, event: Event, now_s: float) -> None:
        match event:
            case Start():
                self._start(event, now_s)
            case NoteArrived(peer, note, digest):
                self._handle_note(peer, note, digest, now_s)
            case PagesDigested(room_id, digest):
                self._imports.take_digest(self._rooms[room_id], digest, now_s)
            case PagesUnpacked(room_id, error):
                self._imports.take_unpacked(self._rooms[room_id], error, now_s)
            case AbortRoom(room_id, reason) if room_id in self._rooms:
                self._rooms.fail(self._rooms[room_id], Failure(FailureCode.ABORTED, reason))
            case PeerUp(peer, in_parts):
                self._rooms.peer_up(peer)
                self._imports.peers_in_parts |= {peer} if in_parts else set()
            case PeerDown(peer, reason):
                self._imports.peers_in_parts.discard(peer)
                self._rooms.peer_down(peer, reason)
            case WriterGone(peer):
                self._rooms.writer_gone(peer)
            case GrammarReady(room_id, matcher) if room_id in self._rooms:
                self._take_matcher(self._rooms[room_id], matcher, now_s)
            case GrammarFailed(room_id, message) if room_id in self._rooms:
                self._rooms.fail(self._rooms[room_id], Failure(FailureCode.INVALID, message))
            case WriteDone() | AbortRoom() | GrammarReady() | GrammarFailed():
                pass  # decode writes no pages; an unknown room has ended
        self._grant_pages(now_s)

    def _start(self, event: Start, now_s: float) -> None:
        request = event.request
        known = request.room in self._rooms
        limits = self._limits
        failure = refuse(request, is_known=known, max_tokens=self._max_tokens, vocab_size=limits.vocab_size)
        failure = failure or turn_away(len(self._waiting), limits.scheduling.max_waiting)
        if failure is None and event.peer not in self._rooms.linked:
            failure = Failure(FailureCode.PEER_LOST, f"no link to prefill worker {event.peer:016x}")
        if failure:
            self._effects.append(Emit(Output(request.room, failure=failure)))
            return
        request.max_len = min(request.max_len, self._max_tokens)
        request.end_ids = end_ids(request.params, limits.eos_ids)
        request.prompt_logprobs = None  # prefill reports them
        self._rooms.add(DecodeRoom(request, event.peer, arrival_s=now_s))
        if not request.is_ready:  # pages are granted meanwhile: only the hand-off waits
            self._effects.append(compile_grammar(request))

    def _take_matcher(self, room: DecodeRoom, matcher: Matcher, now_s: float) -> None:
        room.request.matcher = matcher
        if room.phase is Phase.IMPORTING:
            self._imports.resume(room, now_s)

    def _handle_note(self, peer: int, note: Note, digest: int | None, now_s: float) -> None:
        room = self._rooms.shared_with(peer, note.room)
        if room is None:
            if isinstance(note, HandOff):  # its room has ended here, and prefill may have missed our last word
                self._effects.append(SendNote(peer, Ack(note.room)))
            return
        match note:
            case HandOff() if room.phase in JOINED:
                self._effects.append(SendNote(peer, Ack(note.room)))
            case HandOff() if room.phase is Phase.IMPORTING:
                self._imports.take(room, note, digest, now_s)
            case Abort(_, code, message):
                self._rooms.prefill_gave_up(room, Failure(FailureCode(code or FailureCode.ABORTED.value), message))
            case AbortAck() if room.phase is Phase.CLOSING:
                self._rooms.writer_stopped(room)
            case _:
                pass  # a duplicate, or a hand-off that crossed our abort: its AbortAck follows

    # steps

    def plan(self, now_s: float) -> ForwardBatch | None:
        self._now_s = now_s
        step = self._running.mixed_step(now_s)
        if step is None:
            return None
        for chunk in step.chunks:
            if (room := self._rooms[chunk.request.room]) in self._rooms.retracted:
                self._rooms.retracted.resume(room)
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

    def _grant_pages(self, now_s: float) -> None:
        """Grant pages to waiting rooms; those retracted go first."""
        if not self._retracted:
            self._effects += self._grants.give(now_s)

    def _note_retraction(self, request: Request) -> None:
        """Out of KV memory: the request waits here, and later computes again what is not cached any more."""
        self._rooms.retracted.add(self._rooms[request.room], self._now_s)

    def _take_token(self, row: Sampled, now_s: float) -> None:
        request, token_id, logprobs = row
        room = self._rooms[request.room]
        failure = refuse_token(request, token_id)
        if failure is not None:
            self._rooms.drop(room, failure)
            return
        index = request.num_output_tokens
        request.append(token_id)
        if index == 1:
            room.stats.join_s = now_s - room.verified_s
        finish = finish_of(request, token_id, self._limits.eos_ids)
        if finish is None:
            self._effects.append(Emit(Output(request.room, index, (token_id,), logprobs=logprobs)))
        else:
            self._rooms.finish(room, Output(request.room, index, (token_id,), finish, None, room.stats, logprobs))

    # time and state

    def expire(self, now_s: float) -> None:
        self._rooms.expire(now_s)
        self._grant_pages(now_s)

    def next_deadline_s(self) -> float | None:
        return self._rooms.next_s()

    def suspects(self) -> set[int]:
        """Peers without a link whose writes our quarantine still waits out."""
        return self._rooms.closing.peers() - self._rooms.linked

    def take_effects(self) -> list[Effect]:
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def load(self) -> Load:
        return Load(
            num_waiting=len(self._rooms) - len(self._running) - self._rooms.num_given_up,
            num_running=len(self._running),
            free_pages=self._cache.num_available,
            total_pages=self._cache.pool.capacity,
            waiting_tokens=self._waiting.num_tokens + self._running.waiting_tokens,
            grantable_pages=self._grantable_pages,
        )

    @property
    def _grantable_pages(self) -> int:
        if self._waiting or self._retracted or not self._cache.has_row:
            return 0
        return self._cache.num_available

    @property
    def num_open_rooms(self) -> int:
        return len(self._rooms)

    @property
    def num_retracted(self) -> int:
        return self._rooms.retracted.num_retracted

    @property
    def num_pages_received(self) -> int:
        return self._imports.num_pages_received

    @property
    def num_integrity_failures(self) -> int:
        return self._imports.num_integrity_failures

    def quarantined_since_s(self) -> float | None:
        return self._rooms.closing.oldest_s()

    def page_counts(self) -> dict[str, int]:
        return self._cache.pool.counts()

    def check(self) -> list[str]:
        return self._rooms.check()
