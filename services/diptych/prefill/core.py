"""The scheduler core of a prefill worker: computes prompts and writes their KV into the pages that decode granted.

Order of what a peer sees of a room: page writes, then `HandOff`; or `Abort`/`AbortAck`, after which no write comes.
A room is queued to be computed once it has all that it waits for: decode's pages, and its grammar if it has one.
`Sender` moves the pages, and `Rooms` ends what began here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.adapter_turns import ENOUGH_SLOTS, Turns
from diptych.engine.schedule.admission import refuse, refuse_without_pixels
from diptych.engine.schedule.batch_builder import BuildBatch, build_batch
from diptych.engine.schedule.extend_queue import Coming, ExtendQueue, nothing_comes
from diptych.engine.schedule.pace.prompts import NextPrompt
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.schedule.sampled import NO_TOKEN_FAILURES, Sampled, collect_prompt_logprobs, refuse_token, sampled
from diptych.engine.schedule.sampling_builder import build_sampling
from diptych.engine.schedule.waiting_queue import new_waiting_queue
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.core_report import CoreCounts, CoreReport, Holders, Load
from diptych.engine.values.events import (
    AbortRoom,
    Crossing,
    Effect,
    Emit,
    Event,
    GrammarFailed,
    GrammarReady,
    HandBack,
    HandOffSent,
    NoteArrived,
    PagesRestored,
    PeerDown,
    SendNote,
    Start,
    WriteDone,
    compile_grammar,
)
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import Request
from diptych.engine.values.step import new_step
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.finish import Finish
from diptych.generation.grammar import Matcher
from diptych.generation.output import Failure, FailureCode, Output
from diptych.generation.page_hash import prompt_hash
from diptych.generation.stop.conditions import token_finish
from diptych.kvtransfer.notes import Abort, Ack, HandOff, Note, PagesReady
from diptych.prefill.phases import Phase, Signal
from diptych.prefill.rendezvous import Rendezvous
from diptych.prefill.room import PrefillRoom
from diptych.prefill.rooms import Rooms
from diptych.prefill.sending import Sender, first_output, hand_off_note


def nothing_behind(request: Request) -> bytes:
    """See `Drafter.row_behind`: nobody guesses."""
    return b""


class PrefillCore:
    """Implements `SchedulerCore` for the prefill role."""

    can_overlap = False

    def __init__(
        self,
        cache: KvCache,
        limits: Limits,
        rules: TransferRules,
        page_nbytes: int,
        pace: StepPace,
        num_decoding: Callable[[], int] = int,
        build: BuildBatch = build_batch,
        turns: Turns = ENOUGH_SLOTS,
        coming: Coming = nothing_comes,
        row_behind: Callable[[Request], bytes] = nothing_behind,
    ) -> None:
        """`num_decoding` says how many requests wait for each step, `coming` what peers send of a prompt's prefix.

        `row_behind`: see `Drafter.row_behind`.
        """
        self._row_behind = row_behind
        self._cache = cache
        self._pace = pace
        self._num_decoding = num_decoding
        self._build = build
        self._limits = limits
        self._token_nbytes = page_nbytes // cache.page_size
        self.max_tokens = min(limits.context_len, cache.max_request_tokens)
        self._waiting = new_waiting_queue(cache, limits.scheduling)
        self._turns = turns
        self._queue = ExtendQueue(cache, self._waiting, limits, turns, coming)
        self.effects: list[Effect] = []  # to be carried out, for `pop_effects`
        self._sender = Sender(cache, rules, self.effects)
        self._rooms = Rooms(cache, self._queue, self._sender, self.effects, rules.timeout_s)
        self.by_room: Mapping[int, PrefillRoom] = self._rooms.by_room
        self._rendezvous = Rendezvous()
        self._step = new_step((), ())

    # events

    def handle(self, event: Event, now_s: float) -> None:
        match event:
            case Start():
                self._start(event, now_s)
            case NoteArrived(peer, note):
                self._handle_note(peer, note, now_s)
            case AbortRoom(room_id, reason) if room_id in self._rooms:
                self._rooms.fail(self._rooms[room_id], Failure(FailureCode.ABORTED, reason))
            case HandBack(room_id) if room_id in self._rooms:
                self._rooms.hand_back(self._rooms[room_id])
            case WriteDone(room_id, error, digest) if room_id in self._rooms:
                self._rooms.write_done(self._rooms[room_id], error, digest)
            case HandOffSent(room_id, seconds) if room_id in self._rooms:
                self._rooms[room_id].sending_s = seconds
            case PeerDown(peer, reason):
                self._rendezvous.forget(peer)
                self._rooms.lose(peer, reason)
            case GrammarReady(room_id, matcher) if room_id in self._rooms:
                self._on_matcher(self._rooms[room_id], matcher)
            case GrammarFailed(room_id, message, code) if room_id in self._rooms:
                self._rooms.fail(self._rooms[room_id], Failure(code, message))
            case PagesRestored(number, error):
                self._cache.finish_restore(number, error)
            case _:
                pass  # the room has ended; or it is of writes into our pool, and there are none

    def _start(self, event: Start, now_s: float) -> None:
        request = event.request
        known, num_waiting = self.has_room(request.room), len(self._waiting)
        failure = refuse(request, self._limits, is_known=known, max_tokens=self.max_tokens, num_waiting=num_waiting)
        failure = failure or refuse_without_pixels(request)
        if failure:
            self.effects.append(Emit(Output(request.room, failure=failure)))
            return
        request.state_len = request.prompt_len
        request.given_len = self._queue.given_len(request)
        room = PrefillRoom(request, event.peer, arrival_s=now_s)
        self._rooms.add(room)
        if not request.is_ready:
            self.effects.append(compile_grammar(request))
        match self._rendezvous.pop(event.peer, request.room):
            case PagesReady() as grant:
                self._on_grant(room, grant, now_s)
            case Abort(_, _, message):
                room.abort_ack_sent = True
                self._rooms.fail(room, Failure(FailureCode.ABORTED, f"decode gave up: {message}"))

    def hand_over(self, request: Request, moved: int, peer: int, now_s: float) -> None:
        """Send a request that is computed, and holds its pages, to a peer, which goes on from its newest token.

        That is told at once, as if it were the first one. `moved` is the room in which it has run here.
        """
        room = PrefillRoom(request, peer, arrival_s=now_s, moved=moved, finish=Finish.STOP)
        self._rooms.add(room)
        self.effects.append(Emit(Output(request.room, 0, (_newest(request),), None, None, room.stats)))

    def pop_returned(self) -> list[PrefillRoom]:
        """Return rooms of moved requests that have ended, well or not: what they hold is the caller's."""
        return self._rooms.pop_returned()

    def _handle_note(self, peer: int, note: Note, now_s: float) -> None:
        room = self._rooms.shared_with(peer, note.room)
        if room is None:
            self.effects += self._rendezvous.receive(peer, note, now_s)
            return
        match note:
            case PagesReady() if room.phase is Phase.BOOTSTRAPPING:
                self._on_grant(room, note, now_s)
            case Ack() if room.phase is Phase.TRANSFERRING:
                self._rooms.acknowledge(room, now_s)
            case Abort(_, code, message):
                room.abort_ack_wanted = True
                self._rooms.fail(room, Failure(FailureCode(code or FailureCode.ABORTED.value), message))
            case _:
                pass  # a duplicate, or an answer to a room that is closing: its end is on the way

    def _on_grant(self, room: PrefillRoom, grant: PagesReady, now_s: float) -> None:
        problem = room.refuse_grant(grant, prompt_hash, self._cache.handed)
        if problem:
            self._rooms.fail(room, Failure(FailureCode.INVALID, problem))
            return
        room.on_grant(grant)
        if room.moved:
            self._send_computed(room, now_s)
            return
        self._queue.expect(room.request)
        if room.request.is_ready:
            self._waiting.add(room.request)

    def _send_computed(self, room: PrefillRoom, now_s: float) -> None:
        room.on(Signal.ADMITTED)
        room.on(Signal.EXTENDED)
        room.first_step_s = room.first_token_s = now_s
        room.note_moved(self._token_nbytes)
        self._sender.hand_off(room, self._note(room, _newest(room.request), None), now_s)

    def _on_matcher(self, room: PrefillRoom, matcher: Matcher) -> None:
        room.request.matcher = matcher
        if room.phase is Phase.WAITING:
            self._waiting.add(room.request)

    # steps

    def next_prompt(self, now_s: float) -> NextPrompt | None:
        """Return whose prompt is computed next, if there is one."""
        return self._queue.next_prompt(now_s) if self.has_prompts else None

    def plan(self, now_s: float, least: int = 0) -> ForwardBatch | None:
        """Launch a step. `least`: what prompts get however late outputs are that wait, see `StepPace.apart`."""
        if not self.has_prompts:
            return None
        num_decoding, most = self._num_decoding(), self._limits.max_step_tokens
        wanted = self._queue.waiting_tokens if num_decoding else most
        first = self._queue.next_prompt(now_s) if num_decoding else None
        budget = self._pace.apart(most, num_decoding, now_s, max(1, wanted), first, least)
        chunks = self._queue.plan(now_s, budget, lambda request: 0)
        for chunk in chunks:
            room = self._rooms[chunk.request.room]
            if room.phase is Phase.WAITING:
                room.on(Signal.ADMITTED)
                room.first_step_s = now_s
                room.stats.cached_tokens = chunk.request.cached_len
                self._queue.expect_from(chunk.request, self._not_begun)
                self._sender.move_complete_pages(room, now_s)
            else:
                room.stats.note_chunk(now_s - room.first_step_s)
            if chunk.is_last:
                self._sender.follow_last_chunk(room, now_s)
        if not chunks:
            return None
        self._step = new_step((), chunks)
        cache = self._cache
        batch = self._build(
            self._step,
            cache.page_table,
            cache.page_size,
            pages_per_state=cache.pages_per_state,
            window_table=cache.window_table,
        )
        self._pace.begin(self._limits.prompt_cost.of_chunks(chunks), now_s)
        self._step.launch()
        self._queue.launch(chunks)
        return batch

    @property
    def _not_begun(self) -> list[Request]:
        phases = (Phase.BOOTSTRAPPING, Phase.WAITING)
        return [room.request for room in self._rooms if room.phase in phases and not room.moved]

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt waits to be computed, or is part-way."""
        return bool(self._queue)

    def sampling(self) -> SamplingBatch:
        limits = self._limits
        return build_sampling(self._step.sampled, limits.eos_ids, limits.vocab_size, limits.processors)

    def commit(self, result: StepResult, now_s: float) -> None:
        self._pace.end(now_s - result.late_s)
        collect_prompt_logprobs(self._step.chunks, result)
        for chunk in self._step.chunks:
            if not chunk.is_last:
                self._sender.share(self._rooms[chunk.request.room])
                self._sender.move_complete_pages(self._rooms[chunk.request.room], now_s)
        for row in sampled(self._step, result, range(len(self._step.sampled))):
            self._hand_off(row, now_s)

    def rooms_of_step(self) -> Set[int]:
        return self._step.rooms

    def give_up(self) -> None:
        self._pace.give_up()
        self._step.undo()
        self._queue.recall(self._step.chunks)

    def _hand_off(self, row: Sampled, now_s: float) -> None:
        request, token_ids, *_ = row
        room = self._rooms[request.room]
        room.on(Signal.EXTENDED)
        self._turns.end(request.room)
        (token_id,) = token_ids  # a chunk has one sample
        failure = refuse_token(request, token_id)
        if failure is not None:
            if failure in NO_TOKEN_FAILURES:
                self._cache.distrust(request)
            self._rooms.fail(room, failure)
            return
        self._sender.share(room)
        finish = request.grammar_finish or token_finish(token_id, 1, request.params, self._limits.eos_ids)
        room.finish = finish or Finish.STOP
        self.effects.append(Emit(first_output(room, row, now_s, self._token_nbytes), Crossing.HANDED))
        self._sender.hand_off(room, self._note(room, token_id, finish), now_s)

    def _note(self, room: PrefillRoom, token_id: int, finish: Finish | None) -> HandOff:
        return hand_off_note(room, token_id, finish, self._row_behind(room.request))

    # time and state

    def expire(self, now_s: float) -> None:
        if self.by_room:
            self._rooms.expire(now_s)
            self._queue.expire(now_s)
        if self._rendezvous.parked:
            self._expire_parked(now_s)

    def _expire_parked(self, now_s: float) -> None:
        for peer, room_id in self._rendezvous.expire(now_s):
            reason = Abort(room_id, FailureCode.ABORTED.value, "the router never sent this room to prefill")
            self._rendezvous.park(peer, reason, now_s)  # decode takes its pages back: they must not be written any more
            self.effects.append(SendNote(peer, reason))

    def next_deadline_s(self) -> float | None:
        times = (self._rooms.next_s(), self._rendezvous.next_expiry_s(), self._queue.next_s())
        return min((at_s for at_s in times if at_s is not None), default=None)

    def suspects(self) -> set[int]:
        return set()  # nobody writes into this pool

    def pop_effects(self) -> list[Effect]:
        effects = self.effects.copy()
        self.effects.clear()
        return effects

    def load(self) -> Load:
        phases = [room.phase for room in self._rooms]
        num_still = sum(room.stands_still for room in self._rooms)
        num_waiting = phases.count(Phase.BOOTSTRAPPING) + phases.count(Phase.WAITING) - num_still
        return Load(
            num_waiting=num_waiting,
            num_running=phases.count(Phase.RUNNING) + phases.count(Phase.TRANSFERRING) + num_still,
            free_pages=self._cache.num_available,
            total_pages=self._cache.pool.capacity,
            window_pages=self._cache.num_window_pages_held,
            next_beside_pages=self._cache.num_beside_next,
            waiting_tokens=sum(room.uncomputed_len for room in self._rooms),
            num_waiting_prompts=num_waiting,
            blocked_tokens=sum(room.uncomputed_len for room in self._rooms if room.phase is Phase.BOOTSTRAPPING),
        )

    def has_room(self, room_id: int) -> bool:
        return room_id in self._rooms

    def admitted_prompts(self) -> list[Request]:
        """Return prompts that hold pages until they are sent; not moved requests, which may come back."""
        return [room.request for room in self._rooms if room.request.node is not None and not room.moved]

    def holders(self) -> Holders:
        """Return who claims pages."""
        return Holders([room.request for room in self._rooms if room.request.node is not None])

    def report(self) -> CoreReport:
        return CoreReport(len(self._rooms), self.holders(), CoreCounts())


def _newest(request: Request) -> int:
    """Return the newest token of a request that runs, which is a computed prompt but for that."""
    return request.tokens.item(request.prompt_len)
