"""The scheduler core of an embedded engine: prefill and decode in one place, no transfer.

Prefill first: while a prompt waits and fits, extend steps run; otherwise every running request decodes one token.
A retracted request goes to the head of the queue and computes its KV again.
"""

from __future__ import annotations

from diptych.engine.admission import is_full, refuse
from diptych.engine.batch import ForwardBatch, StepResult
from diptych.engine.batch_builder import build_decode, build_extend
from diptych.engine.decode_batch import DecodeBatch
from diptych.engine.events import (
    AbortRoom,
    Effect,
    Emit,
    Event,
    GrammarFailed,
    GrammarReady,
    Load,
    Start,
    compile_grammar,
)
from diptych.engine.extend_queue import Chunk, ExtendQueue
from diptych.engine.finish import Finish
from diptych.engine.kv_cache import KvCache
from diptych.engine.limits import Limits
from diptych.engine.output import Failure, FailureCode, Output, Stats
from diptych.engine.request import Request
from diptych.engine.sampled import Sampled, collect_prompt_logprobs, refuse_token, sampled, take_prompt_logprobs
from diptych.engine.stop import token_finish
from diptych.engine.waiting_queue import new_waiting_queue


class AggregatedCore:
    """Implements `SchedulerCore` for requests that are prefilled and decoded here."""

    def __init__(self, cache: KvCache, limits: Limits) -> None:
        self._cache = cache
        self._limits = limits
        self._max_tokens = min(limits.context_len, cache.max_request_tokens)
        self._waiting = new_waiting_queue(cache, limits.scheduling)
        self._queue = ExtendQueue(
            cache, self._waiting, max_step_tokens=limits.max_step_tokens, max_batch_size=limits.max_requests
        )
        self._batch = DecodeBatch(cache)
        self._requests: dict[int, Request] = {}
        self._chunks: list[Chunk] = []  # of the planned step; empty: it is a decode step
        self._effects: list[Effect] = []

    def handle(self, event: Event, now_s: float) -> None:
        match event:
            case Start(request):
                self._start(request)
            case AbortRoom(room, reason) if room in self._requests:
                self._fail(self._requests[room], Failure(FailureCode.ABORTED, reason))
            case GrammarReady(room, matcher) if room in self._requests:
                self._requests[room].matcher = matcher
                self._queue.add(self._requests[room])
            case GrammarFailed(room, message) if room in self._requests:
                self._fail(self._requests[room], Failure(FailureCode.INVALID, message))
            case AbortRoom() | GrammarReady() | GrammarFailed():
                pass  # it has ended meanwhile
            case _:
                raise AssertionError(f"an aggregated engine has no peers, yet {event} came")

    def plan(self, now_s: float) -> ForwardBatch | None:
        self._chunks = self._queue.plan(now_s, spare_pages=len(self._batch))
        if self._chunks:
            return build_extend(self._chunks, self._cache.page_table, self._cache.page_size, self._limits.eos_ids)
        for request in self._batch.make_room():
            self._queue.add_first(request)
        if len(self._batch) == 0:
            return None
        return build_decode(list(self._batch), self._cache.page_table, self._cache.page_size, self._limits.eos_ids)

    def commit(self, result: StepResult, now_s: float) -> None:
        if self._chunks:
            collect_prompt_logprobs(self._chunks, result)
            requests = self._queue.commit(self._chunks)
            for request in requests:
                self._batch.add(request)
        else:
            requests = self._batch.commit()
        for row in sampled(requests, result):
            self._take_token(row)

    def expire(self, now_s: float) -> None:
        for request in list(self._requests.values()):
            if request.deadline_s is not None and request.deadline_s <= now_s:
                self._fail(request, Failure(FailureCode.DEADLINE, "the request's deadline passed"))

    def next_deadline_s(self) -> float | None:
        return min((r.deadline_s for r in self._requests.values() if r.deadline_s is not None), default=None)

    def suspects(self) -> set[int]:
        return set()  # nobody writes into this pool

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def load(self) -> Load:
        return Load(
            num_waiting=len(self._requests) - len(self._batch),
            num_running=len(self._batch),
            free_pages=self._cache.num_available,
            total_pages=self._cache.pool.capacity,
            waiting_tokens=self._queue.waiting_tokens,
        )

    @property
    def num_open_rooms(self) -> int:
        return len(self._requests)

    @property
    def num_pages_received(self) -> int:
        return 0  # nobody writes into this pool

    @property
    def num_integrity_failures(self) -> int:
        return 0  # decode checks

    def page_counts(self) -> dict[str, int]:
        return self._cache.pool.counts()

    def check(self) -> list[str]:
        return self._cache.check([*self._queue.admitted, *self._batch])

    def _start(self, request: Request) -> None:
        known = request.room in self._requests
        limits = self._limits
        failure = refuse(request, is_known=known, max_tokens=self._max_tokens, vocab_size=limits.vocab_size)
        if failure:
            self._effects.append(Emit(Output(request.room, failure=failure)))
            return
        self._requests[request.room] = request
        if request.is_ready:
            self._queue.add(request)
        else:
            self._effects.append(compile_grammar(request))

    def _take_token(self, row: Sampled) -> None:
        request, token_id, logprobs = row
        failure = refuse_token(request, token_id)
        if failure is not None:
            self._fail(request, failure)
            return
        index = request.num_output_tokens
        request.append(token_id)
        finish = request.grammar_finish or token_finish(
            token_id, request.num_output_tokens, request.params, self._limits.eos_ids
        )
        if finish is None and is_full(request, self._max_tokens):
            finish = Finish.LENGTH
        stats = Stats(cached_tokens=request.cached_len) if finish else None
        output = Output(
            request.room,
            index,
            (token_id,),
            finish,
            stats=stats,
            logprobs=logprobs,
            prompt_logprobs=take_prompt_logprobs(request),
        )
        self._effects.append(Emit(output))
        if finish is not None:
            self._batch.remove(request)
            self._cache.retire(request)
            self._forget(request)

    def _fail(self, request: Request, failure: Failure) -> None:
        if any(running is request for running in self._batch):
            self._batch.remove(request)
        elif request.is_ready:
            self._queue.remove(request)
        if request.node is not None:
            self._cache.drop(request)
        self._forget(request)
        self._effects.append(Emit(Output(request.room, failure=failure)))

    def _forget(self, request: Request) -> None:
        self._waiting.charge_output(request)
        del self._requests[request.room]
