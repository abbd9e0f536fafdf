"""The scheduler core of an embedded engine: prefill and decode in one place, no transfer.

Every step decodes one token of each running request, and prompts get what is left of its token budget and its time.
A retracted request goes to the head of the queue and computes again what is not cached any more of its KV.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.admission import refuse, turn_away
from diptych.engine.schedule.deadlines import Deadlines
from diptych.engine.schedule.running import Running
from diptych.engine.schedule.sampled import (
    NO_TOKEN_FAILURE,
    Sampled,
    append_tokens,
    collect_prompt_logprobs,
    refuse_tokens,
    sampled,
    take_plain,
    take_prompt_logprobs,
)
from diptych.engine.schedule.step_pace import StepPace
from diptych.engine.schedule.waiting_queue import new_waiting_queue
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.core_report import CoreCounts, CoreReport, Holders, Load
from diptych.engine.values.events import (
    AbortRoom,
    Effect,
    Emit,
    Event,
    GrammarFailed,
    GrammarReady,
    PagesRestored,
    Start,
    compile_grammar,
)
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import Request
from diptych.generation.output import Failure, FailureCode, Output, Stats
from diptych.generation.stop.conditions import end_ids


class AggregatedCore:
    """Implements `SchedulerCore` for requests that are prefilled and decoded here."""

    can_overlap = True

    def __init__(self, cache: KvCache, limits: Limits) -> None:
        self._cache = cache
        self._limits = limits
        self.max_tokens = min(limits.context_len, cache.max_request_tokens)
        self._waiting = new_waiting_queue(cache, limits.scheduling)
        self._running = Running(cache, limits, self._waiting, StepPace(limits.mixed_step_s), self._count_retraction)
        self._requests: dict[int, Request] = {}
        self._deadlines = Deadlines()
        self._effects: list[Effect] = []
        self._counts = CoreCounts()

    def handle(self, event: Event, now_s: float) -> None:
        match event:
            case Start(request):
                self._start(request)
            case AbortRoom(room, reason) if room in self._requests:
                self._fail(self._requests[room], Failure(FailureCode.ABORTED, reason))
            case GrammarReady(room, matcher) if room in self._requests:
                self._requests[room].matcher = matcher
                self._waiting.add(self._requests[room])
            case GrammarFailed(room, message, code) if room in self._requests:
                self._fail(self._requests[room], Failure(code, message))
            case PagesRestored(number, error):
                self._cache.finish_restore(number, error)
            case AbortRoom() | GrammarReady() | GrammarFailed():
                pass  # it has ended meanwhile
            case _:
                raise AssertionError(f"an aggregated engine has no peers, yet {event} came")

    def plan(self, now_s: float) -> ForwardBatch | None:
        step = self._running.plan(now_s)
        return self._running.launch(step, now_s) if step else None

    def sampling(self) -> SamplingBatch:
        return self._running.sampling()

    def commit(self, result: StepResult, now_s: float) -> None:
        step = self._running.commit(now_s)
        collect_prompt_logprobs(step.chunks, result)
        tokens, others = take_plain(step, result)
        if tokens.rooms:
            self._effects.append(tokens)
        for row in sampled(step, result, others):
            self._take_tokens(row)
        self._running.share(step)

    def rooms_of_step(self) -> Set[int]:
        return self._running.rooms_of_step()

    def give_up(self) -> None:
        self._running.give_up()

    def expire(self, now_s: float) -> None:
        for request in self._deadlines.due(now_s):
            self._fail(request, Failure(FailureCode.DEADLINE, "the request's deadline passed"))

    def next_deadline_s(self) -> float | None:
        return self._deadlines.next_s()

    def suspects(self) -> set[int]:
        return set()  # nobody writes into this pool

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def load(self) -> Load:
        return Load(
            num_waiting=len(self._requests) - len(self._running),
            num_running=len(self._running),
            free_pages=self._cache.num_available,
            total_pages=self._cache.pool.capacity,
            waiting_tokens=self._running.waiting_tokens,
            num_waiting_prompts=self._running.num_prompts,
        )

    def report(self) -> CoreReport:
        holders = Holders([*self._running.admitted, *self._running.leaving])
        return CoreReport(len(self._requests), holders, replace(self._counts))

    def _start(self, request: Request) -> None:
        known = request.room in self._requests
        limits = self._limits
        failure = refuse(request, is_known=known, max_tokens=self.max_tokens, vocab_size=limits.vocab_size)
        failure = failure or turn_away(len(self._requests) - len(self._running), limits.scheduling.max_waiting)
        if failure:
            self._effects.append(Emit(Output(request.room, failure=failure)))
            return
        request.max_len = min(request.max_len, self.max_tokens)
        request.end_ids = end_ids(request.params, limits.eos_ids)
        self._requests[request.room] = request
        self._deadlines.add(request)
        if request.is_ready:
            self._waiting.add(request)
        else:
            self._effects.append(compile_grammar(request))

    def _take_tokens(self, row: Sampled) -> None:
        request, token_ids, logprobs = row
        failure = refuse_tokens(request, token_ids)
        if failure is NO_TOKEN_FAILURE:
            self._running.distrust(request)
        if failure is not None:
            self._fail(request, failure)
            return
        index = request.num_output_tokens
        taken, finish = append_tokens(request, token_ids, self._limits.eos_ids)
        stats = Stats(cached_tokens=request.cached_len) if finish else None
        prompt_logprobs = take_prompt_logprobs(request)
        self._effects.append(Emit(Output(request.room, index, taken, finish, None, stats, logprobs, prompt_logprobs)))
        if finish is not None:
            self._running.finish(request)
            self._forget(request)

    def _fail(self, request: Request, failure: Failure) -> None:
        if request.is_ready:
            self._running.drop(request)
        self._forget(request)
        self._effects.append(Emit(Output(request.room, failure=failure)))

    def _forget(self, request: Request) -> None:
        request.has_ended = True
        self._waiting.charge_output(request)
        del self._requests[request.room]

    def _count_retraction(self, request: Request) -> None:
        self._counts.retractions += 1
