"""The core of every scheduler: a prefill and a decode core over one KV cache, whatever role is served.

So a role changes without a reload, and what began in a former role still comes to its end. An event goes to the core
that has its room; a note of a room that nobody has, to the one that hears such notes. A step belongs to one core, and
they take turns while both have something to compute, and outputs have time for a step of prompts (`StepPace`). Prompts
of both cores are computed in one order: taking turns would have all of them wait for each other.

`Reserve` keeps some memory free for prompts that are computed for others, so that no workers wait for each other.

A room holds pages here for another worker's sake only while they are granted and not handed off (IMPORTING). Everything
else that holds pages comes to its end by itself: a request that decodes goes on or is retracted, a prompt that has its
pages is computed and sent into pages that are granted already, a quarantine ends with a note that needs no memory.

Rule: new grants and new local requests leave as many pages as the largest request may have, less those that prefill has
now, and a row of the page table, which the cache has beside those of requests that run. So when all that ends by itself
has ended, granted pages are at most the pool without the reserve, and whichever prompt is next fits: it is computed,
its pages at the other worker stop being IMPORTING, and so with every room. For the rest of the pool to take such a
request too, one may have half of the pool at most, of what states of recurrent layers leave.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Final

from diptych.common.members.roles import LegKind, Role
from diptych.decode.core import DecodeCore
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.adapter_turns import ENOUGH_SLOTS, Turns
from diptych.engine.schedule.admission import refuse_pooled, refuse_text
from diptych.engine.schedule.batch_builder import BuildBatch, build_batch
from diptych.engine.schedule.pace.prompts import NextPrompt
from diptych.engine.schedule.pace.step_pace import AT_LAST, StepPace
from diptych.engine.schedule.running import Drafter
from diptych.engine.values.batch import ForwardBatch, ForwardMode, SamplingBatch, StepResult
from diptych.engine.values.core_report import CoreReport, Load
from diptych.engine.values.events import (
    AbortRoom,
    Effect,
    Emit,
    Event,
    GiveCache,
    GrammarFailed,
    GrammarReady,
    HandBack,
    HandOffSent,
    Move,
    NoteArrived,
    PagesDigested,
    PagesRestored,
    PagesUnpacked,
    PeerDown,
    PeerUp,
    ServeRole,
    Start,
    ToolCalled,
    WriteDone,
    WriterGone,
)
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import Request
from diptych.engine.values.step import NO_PLAIN_STEPS, PlainSteps
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.output import LEAVING, Failure, FailureCode, Output
from diptych.kvtransfer import notes
from diptych.kvtransfer.notes import Abort, AbortAck, Ack, HandOff, Note, PagesReady, Pull, Pulled, StopPull
from diptych.prefill.core import PrefillCore, nothing_behind
from diptych.unified.ahead import Ahead
from diptych.unified.giving import Giving
from diptych.unified.image_rows import RowPages
from diptych.unified.lending import Lending
from diptych.unified.moves import Moves, NotMoved
from diptych.unified.pulling import Means, Pulling
from diptych.unified.reserve import Reserve, max_tokens

_DEFAULT_KIND: Final = {
    Role.PREFILL: LegKind.PREFILL,
    Role.DECODE: LegKind.DECODE,
    Role.ENCODE: LegKind.ENCODE,
    Role.LOCAL: LegKind.LOCAL,
}

RoleCore = PrefillCore | DecodeCore


class UnifiedCore:
    """Implements `SchedulerCore` for any role."""

    def __init__(
        self,
        cache: KvCache,
        limits: Limits,
        rules: TransferRules,
        page_nbytes: int,
        role: Role,
        build: BuildBatch = build_batch,
        turns: Turns = ENOUGH_SLOTS,
        drafter: Drafter | None = None,
    ) -> None:
        self._cache = cache
        self._limits = limits
        pace = StepPace(limits.mixed_step_s)
        self._of_pulls: list[Effect] = []
        means = Means(
            page_nbytes,
            rules.timeout_s,
            lambda start, count: pace.prompt_s(limits.prompt_cost.of(start, count)),
            lambda: self._reserve.headroom().pages,
            lambda: rules.pulls and not self._giving.is_leaving,
        )
        self._pulls = rules.pulls
        self._giving = Giving(cache, means.compute_s, self._of_pulls, is_on=rules.pulls)
        self._ahead = Ahead(cache, self._of_pulls, is_on=rules.pulls)
        self._pulling = Pulling(cache, means, self._of_pulls)
        self._lending = Lending(cache, self._of_pulls, is_on=rules.pulls)
        coming = self._pulling.coming
        self._prefill = PrefillCore(
            cache,
            limits,
            rules,
            page_nbytes,
            pace,
            lambda: self._decode.num_decoding,
            build,
            turns,
            coming,
            nothing_behind if drafter is None else drafter.row_behind,
        )
        self._reserve = Reserve(cache, self._prefill)
        headroom = self._reserve.headroom
        self._decode = DecodeCore(cache, limits, page_nbytes, pace, headroom, drafter, build, turns, coming)
        self._rows = RowPages(cache, limits, page_nbytes)
        self._moves = Moves(self._decode.leaving, self._prefill)
        self._refusals: list[Effect] = []
        self._stepping: RoleCore = self._decode  # that launched the last step
        self._has_computed = False  # some of a prompt, if the decode core did
        self._serve(role)

    # events

    def handle(self, event: Event, now_s: float) -> None:
        match event:
            case Start():
                self._start(event, now_s)
            case Move():
                self._move(event)
            case NoteArrived(peer, Pull() as note):
                self._lending.on_pull(peer, note, is_taken=self._has_room(note.room), now_s=now_s)
            case NoteArrived(peer, StopPull(number)):
                self._lending.on_stop(peer, number, now_s)
            case NoteArrived(peer, Pulled() as note, digest):
                self._pulling.on_pulled(peer, note, digest, now_s)
            case NoteArrived(peer, notes.Offer() as note):
                self._pulling.on_offer(peer, note, now_s)
            case NoteArrived(peer, notes.OfferEnded() as note) if self._ahead.has(note.room):
                self._ahead.on_ended(peer, note, now_s)
            case NoteArrived(peer, notes.OfferEnded() as note):
                self._giving.on_ended(peer, note, now_s)
            case WriteDone(number, error) if self._lending.has(number):
                self._lending.write_done(number, error, now_s)
            case PagesDigested(number, digest) if self._pulling.has(number):
                self._pulling.on_digest(number, digest, now_s)
            case PagesUnpacked(number, error) if self._pulling.has(number):
                self._pulling.on_unpacked(number, error, now_s)
            case NoteArrived(_, note):
                self._listener(note).handle(event, now_s)
            case AbortRoom(room, reason) if self._moves.has(room):
                self._not_moved(self._moves.cancel(room, Failure(FailureCode.ABORTED, reason), now_s))
            case HandBack(room) if self._moves.has(room):
                self._not_moved(self._moves.cancel(room, LEAVING, now_s))
            case AbortRoom(room) | HandBack(room) | GrammarReady(room) | GrammarFailed(room):
                self._owner(room).handle(event, now_s)
            case WriteDone() | HandOffSent():
                self._prefill.handle(event, now_s)
            case PagesDigested() | PagesUnpacked() | PagesRestored():
                self._decode.handle(event, now_s)
            case PeerUp() | PeerDown() | WriterGone():
                self._on_peer(event, now_s)
            case ServeRole(role):
                self._serve(role)
            case ToolCalled(room, tool):
                self._cache.sessions.called(room, tool, now_s)
            case GiveCache(within_s):
                self._giving.begin(within_s, now_s)
        if self._moves.has_any:
            self._settle_moves(now_s)

    def _on_peer(self, event: PeerUp | PeerDown | WriterGone, now_s: float) -> None:
        self._prefill.handle(event, now_s)
        self._decode.handle(event, now_s)
        match event:
            case PeerUp():
                self._pulling.peer_up(event)
                self._giving.peer_up(event.peer, now_s)
                self._ahead.peer_up(event.peer)
            case PeerDown(peer):
                self._pulling.peer_down(peer, now_s)
                self._lending.forget(peer)
                self._giving.peer_down(peer, now_s)
                self._ahead.peer_down(peer, now_s)
            case WriterGone(peer):
                self._pulling.writer_gone(peer)

    def _has_room(self, number: int) -> bool:
        return self._prefill.has_room(number) or self._decode.has_room(number) or self._moves.has(number)

    def _serve(self, role: Role) -> None:
        self._role = role
        self.max_tokens = max_tokens(role, self._limits.context_len, self._cache)
        self._prefill.max_tokens = self._decode.max_tokens = self.max_tokens
        self._reserve.keep(self.max_tokens if role is Role.UNIFIED else 0)

    def _start(self, event: Start, now_s: float) -> None:
        kind = event.kind or _DEFAULT_KIND.get(self._role)
        problem = self._refuse(event.request, kind)
        if problem:
            self._refusals.append(Emit(Output(event.request.room, failure=problem)))
            return
        if kind is LegKind.ENCODE:
            self._encode(event, now_s)
            return
        self._cache.sessions.arrived(event.request, now_s)
        if kind is LegKind.DECODE:
            event.request.computed_by = event.computed_by or event.peer
        if self._pulls and event.holder is not None and kind is not LegKind.DECODE:
            self._pulling.begin(event.request, event.holder, now_s)
        if self._pulls and event.request.contents and kind is not LegKind.DECODE:
            self._pull_rows(event.request, now_s)
        core = self._prefill if kind is LegKind.PREFILL else self._decode
        if kind is LegKind.POOL:
            kind = LegKind.LOCAL
            self._prepare_pooled(event.request)
        core.handle(event if event.kind is kind else replace(event, kind=kind), now_s)
        if event.request.pinned is not None and not core.has_room(event.request.room):
            self._cache.sessions.waits_no_more(event.request)

    def _pull_rows(self, request: Request, now_s: float) -> None:
        for index, (content, keys, namespace) in enumerate(self._rows.wanted(request)):
            self._pulling.begin_rows(request, content.encoder, index, keys, namespace, now_s)

    def _encode(self, event: Start, now_s: float) -> None:
        """Its end is that of its rows, which stay in the cache."""
        self._decode.handle(replace(event, request=self._rows.encoding(event.request), kind=LegKind.LOCAL), now_s)

    def _move(self, event: Move) -> None:
        if self._has_room(event.room):
            in_use = Failure(FailureCode.INVALID, f"room {event.room:016x} is already in use")
            self._refusals.append(Emit(Output(event.room, failure=in_use)))
        elif (problem := self._moves.begin(event)) is not None:
            self._not_moved(problem)

    def _settle_moves(self, now_s: float) -> None:
        for problem in self._moves.settle(now_s):
            self._not_moved(problem)

    def _not_moved(self, problem: NotMoved) -> None:
        self._refusals.append(Emit(Output(problem.room, failure=problem.failure)))

    def _prepare_pooled(self, request: Request) -> None:
        """Its end is that of its prompt. Beside requests for text it is work for idle time."""
        pooling = self._limits.pooling
        request.is_idle_work = pooling is None
        request.is_whole = pooling is not None and pooling.needs_all_tokens

    def _refuse(self, request: Request, kind: LegKind | None) -> Failure | None:
        """What the one core must not take, for reasons that it does not know."""
        room = request.room
        if kind is None:
            return Failure(FailureCode.INVALID, "the leg doesn't say which part of the request it is")
        if not self._role.serves(kind):
            return Failure(FailureCode.OVERLOADED, f"this worker serves {self._role.value} now, no {kind.value} legs")
        if self._prefill.has_room(room) or self._decode.has_room(room):
            return Failure(FailureCode.INVALID, f"room {room:016x} is already in use")
        if kind is LegKind.ENCODE:
            problem = self._rows.refuse(request)
        else:
            problem = refuse_pooled(request, self._limits) if kind is LegKind.POOL else refuse_text(self._limits)
        return None if problem is None else Failure(FailureCode.INVALID, problem)

    def _owner(self, room: int) -> RoleCore:
        return self._prefill if self._prefill.has_room(room) else self._decode

    def _listener(self, note: Note) -> RoleCore:
        """Who hears a note: of all but an abort there is one side only that hears such notes."""
        match note:
            case PagesReady() | Ack():
                return self._prefill
            case HandOff() | AbortAck():
                return self._decode
            case Abort(room):
                return self._decode if self._decode.has_room(room) else self._prefill
            case Pull() | Pulled() | StopPull() | notes.Offer() | notes.OfferEnded():
                raise AssertionError("notes of pulls are about no room")

    # steps

    @property
    def can_overlap(self) -> bool:
        """Behind steps that decode, while no prompt waits for its turn: pages of prompts are sent between steps."""
        return self._stepping is self._decode and not self._prefill.has_prompts

    def plan(self, now_s: float) -> ForwardBatch | None:
        """Launch a step of the core whose turn it is, or of the other one, which may give pages back instead.

        Where the decode core has none, nobody gets a token before some prompt is computed, however late that is.
        """
        if not self._prefill.by_room:
            return self._plan_decode(now_s)
        first = self._prefill.next_prompt(now_s)
        if self._stepping is self._prefill or self._goes_on(first, now_s):
            elsewhere = first if self._stepping is self._prefill else None
            return self._plan_decode(now_s, elsewhere) or self._plan_prefill(now_s, AT_LAST) or self._plan_decode(now_s)
        return self._plan_prefill(now_s) or self._plan_decode(now_s) or self._plan_prefill(now_s, AT_LAST)

    def _goes_on(self, elsewhere: NextPrompt | None, now_s: float) -> bool:
        """Whether the decode core's last step had some of a prompt that still comes before those of the other core."""
        own = self._decode.next_prompt(now_s) if self._has_computed and elsewhere is not None else None
        return own is not None and elsewhere is not None and own.place < elsewhere.place

    def _plan_prefill(self, now_s: float, least: int = 0) -> ForwardBatch | None:
        batch = self._prefill.plan(now_s, least)
        if batch is not None:
            self._stepping, self._has_computed = self._prefill, False
            return self._rows.begin_step(batch) if self._rows.can_carry else batch
        return None

    def _plan_decode(self, now_s: float, elsewhere: NextPrompt | None = None) -> ForwardBatch | None:
        """`elsewhere`: a prompt of the other core, whose turn it is before those of this one."""
        batch = self._decode.plan(now_s, elsewhere)
        if batch is not None:
            self._stepping, self._has_computed = self._decode, batch.mode is not ForwardMode.DECODE
            return self._rows.begin_step(batch) if self._rows.can_carry else batch
        return None

    def sampling(self) -> SamplingBatch:
        return self._stepping.sampling()

    def commit(self, result: StepResult, now_s: float) -> None:
        self._stepping.commit(result, now_s)
        if self._rows.can_carry:
            self._rows.end_step()
        if self._moves.has_any:
            self._settle_moves(now_s)

    def rooms_of_step(self) -> Set[int]:
        return self._stepping.rooms_of_step()

    def give_up(self) -> None:
        self._stepping.give_up()
        if self._rows.can_carry:
            self._rows.undo_step()

    # steps that can be told beforehand: a simulation need not take them one by one

    def plain_steps(self, token_id: int) -> PlainSteps:
        """Return the steps that follow, as far as they do nothing but give each request its next token, `token_id`.

        That is what they do unless something is heard meanwhile, or a deadline comes. No step may run.
        """
        return NO_PLAIN_STEPS if self._prefill.has_prompts else self._decode.plain_steps(token_id)

    def pass_plain_steps(self, began_s: float, ends_s: Sequence[float], token_id: int) -> None:
        """Be behind some of these steps, which ended at these times, one after the other from `began_s` on.

        Their tokens are not told.
        """
        self._stepping, self._has_computed = self._decode, False
        self._decode.pass_plain_steps(began_s, ends_s, token_id)

    # time and state

    def expire(self, now_s: float) -> None:
        self._cache.tree.at(now_s)
        if self._pulling.has_any:
            self._pulling.expire(now_s)
        self._giving.expire(now_s)
        if self._cache.sessions.left:
            self._ahead.look(now_s)
        self._prefill.expire(now_s)
        self._decode.expire(now_s)
        if self._moves.has_any:
            self._settle_moves(now_s)

    def next_deadline_s(self) -> float | None:
        of_pulls = self._pulling.next_s(), self._giving.next_s()
        times = (self._prefill.next_deadline_s(), self._decode.next_deadline_s(), *of_pulls)
        return min((at_s for at_s in times if at_s is not None), default=None)

    def suspects(self) -> set[int]:
        suspects = self._decode.suspects()
        return suspects | self._pulling.suspects() if self._pulling.has_any else suspects

    def pop_effects(self) -> list[Effect]:
        """Return those of both. A page passes from one core to the other only when nothing is wanted of it any more.

        The tokens of a request that moves come before what is said of its new room.
        """
        refusals, decode, prefill, of_pulls = (
            self._refusals,
            self._decode.effects,
            self._prefill.effects,
            self._of_pulls,
        )
        if not (decode or prefill or of_pulls or refusals):
            return []
        found = [*refusals, *decode, *prefill, *of_pulls]
        for effects in (refusals, decode, prefill, of_pulls):
            effects.clear()
        return found

    def load(self) -> Load:
        decode = self._decode.load()
        if self._role is Role.LOCAL or (self._role is Role.UNIFIED and not self._prefill.by_room):
            return decode  # which is all that there is
        prefill = self._prefill.load()
        return decode._replace(
            num_waiting=prefill.num_waiting + decode.num_waiting,
            num_running=prefill.num_running + decode.num_running,
            waiting_tokens=prefill.waiting_tokens + decode.waiting_tokens,
            num_waiting_prompts=prefill.num_waiting_prompts + decode.num_waiting_prompts,
            grantable_pages=decode.grantable_pages if self._role.serves(LegKind.DECODE) else 0,
            blocked_tokens=prefill.blocked_tokens,
            prompt_budget=decode.prompt_budget if self._role.serves(LegKind.PREFILL) else 0,
        )

    def report(self) -> CoreReport:
        of_pulls = self._pulling.report() + self._lending.report() + self._giving.report() + self._ahead.report()
        return self._prefill.report() + self._decode.report() + of_pulls
