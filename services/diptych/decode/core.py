"""The scheduler core of a decode worker: grants pages, verifies what prefill wrote into them, and decodes.

`Grants` opens pages to prefill, `Imports` takes them back verified, and `Rooms` ends what began here. A local request
is computed here from its first token on, as one that was retracted is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Final

from diptych.common.members.roles import LegKind
from diptych.decode.grants import Grants, Headroom
from diptych.decode.imports import Imports
from diptych.decode.leaving import Leaving
from diptych.decode.phases import Phase
from diptych.decode.room import DecodeRoom
from diptych.decode.rooms import VERIFIED, Rooms
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.adapter_turns import ENOUGH_SLOTS, Turns
from diptych.engine.schedule.admission import refuse, refuse_without_pixels
from diptych.engine.schedule.batch_builder import BuildBatch, build_batch
from diptych.engine.schedule.extend_queue import Coming, nothing_comes
from diptych.engine.schedule.pace.prompts import NextPrompt
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.schedule.running import Drafter, Running
from diptych.engine.schedule.sampled import (
    NO_TOKEN_FAILURES,
    Sampled,
    append_plain,
    collect_prompt_logprobs,
    collect_vectors,
    pop_prompt_logprobs,
    sampled,
    take_tokens,
)
from diptych.engine.schedule.waiting_queue import new_waiting_queue
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.core_report import CoreCounts, CoreReport, Load
from diptych.engine.values.events import (
    AbortRoom,
    Crossing,
    Effect,
    Emit,
    Event,
    GrammarFailed,
    GrammarReady,
    HandBack,
    NoteArrived,
    PagesDigested,
    PagesRestored,
    PagesUnpacked,
    PeerDown,
    PeerUp,
    SendNote,
    Start,
    WriterGone,
    compile_grammar,
)
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import Request
from diptych.engine.values.step import NO_PLAIN_STEPS, PlainSteps
from diptych.generation.grammar import Matcher
from diptych.generation.output import LEAVING, Failure, FailureCode, Output
from diptych.generation.segments import are_computable
from diptych.generation.stop.conditions import end_ids
from diptych.kvtransfer.notes import Abort, AbortAck, Ack, HandOff, Note

WITHOUT_PIXELS: Final = Failure(
    FailureCode.RETRACTED, "KV memory ran out, and the pixels to compute its images again are not on this worker"
)


class DecodeCore:
    """Implements `SchedulerCore` for the decode role."""

    can_overlap = True

    def __init__(
        self,
        cache: KvCache,
        limits: Limits,
        page_nbytes: int,
        pace: StepPace,
        reserve: Callable[[], Headroom] = Headroom,
        drafter: Drafter | None = None,
        build: BuildBatch = build_batch,
        turns: Turns = ENOUGH_SLOTS,
        coming: Coming = nothing_comes,
    ) -> None:
        """`reserve` says what new rooms must leave of the cache, `coming` what peers send of a prompt's prefix."""
        self._cache = cache
        self._limits = limits
        self._pace = pace
        self._counts = CoreCounts()
        self.max_tokens = min(limits.context_len, cache.max_request_tokens)
        retracted = new_waiting_queue(cache, limits.scheduling)
        self._running = Running(cache, limits, retracted, pace, self._note_retraction, drafter, build, turns, coming)
        self._waiting = new_waiting_queue(cache, limits.scheduling)  # for their first pages
        self.effects: list[Effect] = []  # to be carried out, for `pop_effects`
        self._rooms = Rooms(cache, self._waiting, self._running, self.effects, limits.retracted_s)
        self._grants = Grants(cache, self._waiting, self._running, self._rooms, reserve, limits.prompt_cost, turns)
        self._imports = Imports(
            cache,
            self._running,
            self._rooms,
            self.effects,
            self._counts,
            page_nbytes=page_nbytes,
            eos_ids=limits.eos_ids,
            drafter=drafter,
        )
        self.leaving = Leaving(cache, self._running, self._rooms)  # for other workers
        self._now_s = 0.0  # of the step that is planned

    # events

    def handle(self, event: Event, now_s: float) -> None:
        match event:
            case Start():
                self._start(event, now_s)
            case NoteArrived(peer, note, digest):
                self._handle_note(peer, note, digest, now_s)
            case PagesDigested(room_id, digest):
                self._imports.on_digest(self._rooms[room_id], digest, now_s)
            case PagesUnpacked(room_id, error):
                self._imports.on_unpacked(self._rooms[room_id], error, now_s)
            case AbortRoom(room_id, reason) if room_id in self._rooms:
                self._rooms.fail(self._rooms[room_id], Failure(FailureCode.ABORTED, reason))
            case HandBack(room_id) if room_id in self._rooms:
                self._rooms.fail(self._rooms[room_id], LEAVING)
            case PeerUp(peer, in_parts):
                self._rooms.peer_up(peer)
                self._imports.peers_in_parts |= {peer} if in_parts else set()
            case PeerDown(peer, reason):
                self._imports.peers_in_parts.discard(peer)
                self._rooms.peer_down(peer, reason)
            case WriterGone(peer):
                self._rooms.writer_gone(peer)
            case GrammarReady(room_id, matcher) if room_id in self._rooms:
                self._on_matcher(room_id, matcher, now_s)
            case GrammarFailed(room_id, message, code) if room_id in self._rooms:
                self._rooms.fail(self._rooms[room_id], Failure(code, message))
            case PagesRestored(number, error):
                self._cache.finish_restore(number, error)
            case _:
                pass  # the room has ended; or it is of pages that we write, and there are none
        self.effects += self._grants.grant(now_s)

    def _start(self, event: Start, now_s: float) -> None:
        request = event.request
        failure = self._refuse(event)
        if failure:
            self.effects.append(Emit(Output(request.room, failure=failure)))
            return
        request.max_len = min(request.max_len, self.max_tokens)
        request.end_ids = end_ids(request.params, self._limits.eos_ids)
        if event.kind is LegKind.LOCAL:
            request.given_len = self._running.given_len(request)
            self._rooms.add(DecodeRoom(request, 0, now_s, Phase.WAITING))
        else:
            request.given_len = request.num_tokens
            request.is_imported = True
            request.state_len = request.prompt_len
            request.prompt_logprobs = None  # prefill reports them
            self._rooms.add(DecodeRoom(request, event.peer, now_s, Phase.PREALLOCATING))
        if not request.is_ready:  # prefill's writing needn't wait for it: only the hand-off does
            self.effects.append(compile_grammar(request))

    def _refuse(self, event: Start) -> Failure | None:
        request = event.request
        known, num_waiting = self.has_room(request.room), len(self._waiting.expected)
        failure = refuse(request, self._limits, is_known=known, max_tokens=self.max_tokens, num_waiting=num_waiting)
        if failure is None and event.kind is not LegKind.LOCAL and event.peer not in self._rooms.linked:
            return Failure(FailureCode.PEER_LOST, f"no link to prefill worker {event.peer:016x}")
        if failure is None and event.kind is LegKind.LOCAL and request.contents:
            return refuse_without_pixels(request)
        return failure

    def _on_matcher(self, room_id: int, matcher: Matcher, now_s: float) -> None:
        room = self._rooms[room_id]
        self._rooms.on_matcher(room, matcher)
        if room.phase is Phase.IMPORTING:
            self._imports.resume(room, now_s)

    def _handle_note(self, peer: int, note: Note, digest: int | None, now_s: float) -> None:
        room = self._rooms.shared_with(peer, note.room)
        if room is None:
            if isinstance(note, HandOff):  # its room has ended here, and prefill may have missed our last word
                self.effects.append(SendNote(peer, Ack(note.room)))
            return
        match note:
            case HandOff() if room.phase in VERIFIED:
                self.effects.append(SendNote(peer, Ack(note.room)))
            case HandOff() if room.phase is Phase.IMPORTING:
                self._imports.on_hand_off(room, note, digest, now_s)
            case Abort(_, code, message):
                self._rooms.prefill_gave_up(room, Failure(FailureCode(code or FailureCode.ABORTED.value), message))
            case AbortAck() if room.phase is Phase.CLOSING:
                self._rooms.writer_stopped(room)
            case _:
                pass  # a duplicate, or a hand-off that crossed our abort: its AbortAck follows

    # steps

    def next_prompt(self, now_s: float) -> NextPrompt | None:
        """Return whose prompt is computed next, if there is one that has its memory."""
        return self._running.next_prompt(now_s)

    def plan(self, now_s: float, elsewhere: NextPrompt | None = None) -> ForwardBatch | None:
        """Launch a step, if there is one; prompts wait where one `elsewhere` comes before them."""
        self._now_s = now_s
        step = self._running.plan(now_s, elsewhere)
        if step is None and self._waiting and not self._running:  # for a slot, perhaps, given back since the last event
            self.effects += self._grants.grant(now_s)
            step = self._running.plan(now_s, elsewhere)
        if step is None:
            return None
        for chunk in step.chunks:
            room = self._rooms.by_room[chunk.request.room]
            room.measure_step(now_s)
            if self._rooms.retracted.by_room and room in self._rooms.retracted:
                self._rooms.retracted.resume(room)
        return self._running.launch(step, now_s)

    def sampling(self) -> SamplingBatch:
        return self._running.sampling()

    def commit(self, result: StepResult, now_s: float) -> None:
        gives_back = self._running.gives_back
        step = self._running.commit(now_s - result.late_s)
        if step.chunks:
            collect_prompt_logprobs(step.chunks, result)
            collect_vectors(step, result)
        tokens, others, ahead = append_plain(step, result)
        if tokens.rooms:
            self.effects.append(tokens)
        for request, num_more in ahead:
            self._pace.ahead(request, num_more)
        if others:
            for row in sampled(step, result, others):
                self._on_tokens(row, len(step.drafts_of(row.request)) if step.drafts else 0, now_s)
        if step.chunks:
            self._running.share(step)
        if self._waiting.expected and (gives_back or others or step.chunks):
            self.effects += self._grants.grant(now_s)

    def _on_tokens(self, row: Sampled, num_drafts: int, now_s: float) -> None:
        request, token_ids, logprobs, insight = row
        room, index = self._rooms.by_room[request.room], request.num_output_tokens
        taken, finish, failure = take_tokens(request, token_ids, self._limits.eos_ids)
        if taken:
            num_taken = len(taken)
            self._pace.ahead(request, num_taken - 1)
            room.measure_token(index, now_s)
            stats = room.stats if finish or index == 0 else None  # a client may stop reading before the end
            counted, of_prompt = logprobs and logprobs.span(0, num_taken), pop_prompt_logprobs(request)
            num_accepted = min(len(token_ids) - 1, num_taken)
            of_drafts = num_drafts if num_taken == len(token_ids) else num_accepted, num_accepted
            told = Output(request.room, index, taken, finish, None, stats, counted, of_prompt, *of_drafts)
            if insight is not None:
                told = replace(told, insight=insight.span(0, num_taken))
            self._tell(room, told if request.vector is None else replace(told, vector=request.vector))
        if failure is not None:
            if failure in NO_TOKEN_FAILURES:
                self._running.distrust(request)
            self._rooms.drop(room, failure)

    def _tell(self, room: DecodeRoom, output: Output) -> None:
        crossing = Crossing.JOINED if output.first_index == 1 and room.hand_off is not None else None
        if output.finish is None:
            self.effects.append(Emit(output, crossing))
        else:
            self._rooms.finish(room, output, crossing)

    def rooms_of_step(self) -> Set[int]:
        return self._running.rooms_of_step()

    def give_up(self) -> None:
        self._running.give_up()

    def _note_retraction(self, request: Request) -> None:
        """Out of KV memory: the request waits here, and later computes again what is not cached any more.

        One with images whose pixels are not here could not: it is for the router to replay.
        """
        self._counts.retractions += 1
        room = self._rooms[request.room]
        self._rooms.retracted.add(room, self._now_s)
        if not are_computable(request.contents):
            self._rooms.fail(room, WITHOUT_PIXELS)

    def plain_steps(self, token_id: int) -> PlainSteps:
        """See `UnifiedCore.plain_steps`."""
        return NO_PLAIN_STEPS if self._waiting or self.effects else self._running.plain_steps(token_id)

    def pass_plain_steps(self, began_s: float, ends_s: Sequence[float], token_id: int) -> None:
        self._running.pass_plain_steps(began_s, ends_s, token_id)

    # time and state

    def expire(self, now_s: float) -> None:
        self._rooms.expire(now_s)
        self._running.expire(now_s)
        if self._waiting.expected:
            self.effects += self._grants.grant(now_s)

    def next_deadline_s(self) -> float | None:
        times = (self._rooms.next_s(), self._grants.next_s(), self._running.next_s())
        return min((at_s for at_s in times if at_s is not None), default=None)

    def suspects(self) -> set[int]:
        """Peers without a link whose writes our quarantine still waits out."""
        closing = self._rooms.closing
        return closing.peers() - self._rooms.linked if closing.by_room else set()

    def pop_effects(self) -> list[Effect]:
        if not self.effects:
            return []
        effects = self.effects.copy()
        self.effects.clear()
        return effects

    def load(self) -> Load:
        output_step_s, context_token_s, prompt_token_s = self._pace.step_parts_s
        num_running = len(self._running)
        return Load(
            num_waiting=len(self._rooms.by_room) - num_running - self._rooms.num_given_up,
            num_running=num_running,
            free_pages=self._cache.num_available,
            total_pages=self._cache.pool.capacity,
            window_pages=self._cache.num_window_pages_held,
            next_beside_pages=self._cache.num_beside_next,
            waiting_tokens=self._waiting.num_tokens + self._running.waiting_tokens,
            num_waiting_prompts=self._waiting.num_prompts + self._running.num_prompts,
            grantable_pages=self._grants.num_pages_left(),
            num_ungranted=len(self._waiting.expected) + len(self._rooms.retracted.by_room),
            prompt_budget=self._pace.shown(num_running),
            output_tokens=self._pace.output_tokens,
            output_step_s=output_step_s,
            context_token_s=context_token_s,
            prompt_token_s=prompt_token_s,
            tiers=self._cache.prices() if self._cache.has_tiers else (),
        )

    @property
    def num_decoding(self) -> int:
        """Requests that get a token in each step."""
        return len(self._running)

    def has_room(self, room_id: int) -> bool:
        return room_id in self._rooms.by_room

    def report(self) -> CoreReport:
        held, counts = self._rooms.holders(), replace(self._counts)
        since_s = self._rooms.closing.oldest_s()
        return CoreReport(len(self._rooms), held, counts, since_s, self._running.drafts)
