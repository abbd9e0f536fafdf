"""A request's way through the router: admit, prepare, execute (select, dispatch, merge, retry), respond.

The HTTP and gRPC services both stand on this; neither knows workers, and this knows neither of them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
from prometheus_client import Histogram

from diptych.common.errors import DiptychError, InternalError, InvalidRequest
from diptych.generation.finish import Finish
from diptych.generation.output_text import OutputText, TextTokenizer
from diptych.router.admission.admission import Admission, Place
from diptych.router.admission.held_pixels import HeldPixels
from diptych.router.admission.in_flight import InFlight, InFlightRequest
from diptych.router.admission.queue import Claim
from diptych.router.admission.session_door import ContextOfRequest
from diptych.router.admission.session_line import Key
from diptych.router.admission.shedder import Shedder
from diptych.router.admission.ttft_gate import TtftGate
from diptych.router.choose.explain import Explanation
from diptych.router.errors import ABORTED, DISCONNECTED, OK, Shed, outcome_of
from diptych.router.keys.caller import Caller
from diptych.router.metrics import RouterMetrics
from diptych.router.serve.aborts import Aborts
from diptych.router.serve.execution import Dispatcher, Execution
from diptych.router.serve.prepare import Preparer
from diptych.router.serve.response import response_for
from diptych.router.serve.usage_log import UsageLog
from diptych.router.tracing.record import CallTrace, Trace
from diptych.router.tracing.tracer import note_request
from diptych.router.values.kept_sessions import Follow, Turn
from diptych.router.values.leg_results import Report
from diptych.router.values.output import End, Piece, Usage
from diptych.router.values.progress import Progress, RetryLimits
from diptych.router.values.request import LEAST_PRIORITY, ClientRequest, GenerationRequest, ServedModel
from diptych.router.values.usage import UsageRecord
from diptych.router.values.vectors import Pooled

REPORT_WAIT_S: Final = 30.0  # prefill ends a room when it reads decode's Ack: after the step that it runs
IDLE_PRIORITY: Final = -10  # of vectors that a model makes which is there for text, if they name no other
NO_FURTHER_TOKEN_S: Final = 0.0  # between the tokens of an answer that is a vector: it keeps any SLO of theirs


class Sessions(Protocol):
    """Sessions of clients, as `ModelDesk` has them."""

    def request(self, key: Key) -> AbstractContextManager[ContextOfRequest]: ...

    def turn(self, owner: str, follow: Follow, name: str) -> AbstractAsyncContextManager[Turn]: ...


class Pipeline:
    """Serves requests for one model."""

    def __init__(
        self,
        model: ServedModel,
        preparer: Preparer,
        dispatcher: Dispatcher,
        admission: Admission,
        gate: TtftGate,
        shedder: Shedder,
        in_flight: InFlight,
        retries: RetryLimits,
        sessions: Sessions,
        usage: UsageLog | None = None,
        aborts: Aborts | None = None,
    ) -> None:
        """`sessions`: of clients; `aborts`: of all models' calls, where there are several."""
        self._model = model
        self._preparer = preparer
        self._usage = usage  # None: nobody wants to know
        self._dispatcher = dispatcher
        self._admission = admission
        self._gate = gate
        self._shedder = shedder
        self._in_flight = in_flight
        self._retries = retries
        self.aborts = aborts or Aborts()
        self._sessions = sessions
        self._eos_ids = frozenset(model.tokenizer.eos_ids)
        self._parsed_tokenizer = model.tokenizer.showing(model.formats.tokens)
        self._showing_tokenizer = model.tokenizer.showing(model.tokenizer.special_tokens)

    @property
    def metrics(self) -> RouterMetrics:
        return self._dispatcher.metrics

    @property
    def model(self) -> ServedModel:
        """The model, under the name that answers give it."""
        name = self.names[0]
        return self._model if name == self._model.model_id else replace(self._model, model_id=name)

    @property
    def names(self) -> Sequence[str]:
        """What clients are told that the model is called, at least one."""
        return self._model.names or self.model_ids[:1]

    @property
    def model_ids(self) -> Sequence[str]:
        """Its ids, the most served first: workers may have got other weights."""
        return self._dispatcher.fleet.model_ids

    @property
    def all_names(self) -> Sequence[str]:
        """What a request may call the model."""
        return [*self.names, *self.model_ids]

    @property
    def all_adapters(self) -> Sequence[str]:
        """Its adapters, also those that are to be loaded."""
        return [*self.adapters, *self._dispatcher.fleet.expected]

    @property
    def problem(self) -> str | None:
        """Why no request can be served now, in words; None when one can."""
        return self._dispatcher.fleet.problem()

    @property
    def adapters(self) -> Sequence[str]:
        """What clients may ask for beside the model."""
        return self._dispatcher.fleet.adapters()

    @property
    def context_len(self) -> int:
        """Tokens, prompt + output, that model and workers take now."""
        return self._dispatcher.fleet.context_len(self.model.context_len)

    def explain(self, request_id: str) -> Explanation | None:
        """Return why a request went where it did; None if that is not known any more."""
        return self._dispatcher.explanations.find(request_id)

    @asynccontextmanager
    async def admit(self, client: ClientRequest) -> AsyncGenerator[Sequence[GenerationRequest], None]:
        """Hold the places of what a client asks for, and give a request, valid and tokenised, for each of its outputs.

        Raises the caller's `DiptychError`.
        """
        try:
            self._preparer.check(client)
            client = self._preparer.with_tier(client)
            if isinstance(client.trace, CallTrace):
                note_request(client.trace, client, self.model.model_id, self._preparer.adapter(client.model))
            num_requests, tier = client.num_requests, client.tier
            names = {client.life.request_id, *client.rids}
            with (
                self.aborts.abortable(names, client.caller.name, client.state),
                client.caller.admit(num_requests),
                self._in_session(client),
            ):
                self.metrics.offered(tier, num_requests)
                try:
                    self._shedder.check(tier)
                    with self._admission.admit(self._claim(client)) as place, self._preparer.hold(client) as held:
                        async with self._as_turn(client) as begun:
                            yield await self._begin(begun, place, held)
                except Shed:  # it has to give way: now, or while it waited
                    self.metrics.shed(tier, num_requests)
                    raise
        except InvalidRequest as error:
            client.name_as_said(error)
            raise

    @contextmanager
    def _in_session(self, client: ClientRequest) -> Generator[None, None, None]:
        """Hold the session of a request, if it has one, for as long as it waits or runs."""
        with self._sessions.request(Key(client.caller.name, client.routing.session)) as context:
            try:
                yield
            finally:
                context.num_tokens = client.state.context_tokens

    @asynccontextmanager
    async def _as_turn(self, client: ClientRequest) -> AsyncGenerator[ClientRequest, None]:
        """Give a request its turn, if it is one; what is refused before has none: a turn has many tokens."""
        if client.follow is None:
            yield client
            return
        async with self._sessions.turn(client.caller.name, client.follow, _name(client)) as turn:
            yield replace(client, turn=turn)

    async def _begin(self, client: ClientRequest, place: Place, held: HeldPixels | None) -> Sequence[GenerationRequest]:
        """Wait for the place, and prepare what takes it."""
        await place.wait()
        start_s = _took("admit", self.metrics.admit, place.begun_s, client.trace)
        cold_s = await self._wait_while_cold(client)
        prepared = await self._preparer.prepare(client, held)
        if cold_s:
            prepared = [replace(request, cold_s=cold_s) for request in prepared]
        _took("prepare", self.metrics.prepare, start_s, client.trace)
        requests = self._gate.check(prepared)
        client.caller.charge_prompt(sum(request.prompt.num_tokens for request in requests[:: client.num_made]))
        return requests

    async def _wait_while_cold(self, client: ClientRequest) -> float:
        """Return how long the workers took that were started meanwhile, with the adapter that is asked for."""
        fleet, pool, name = self._dispatcher.fleet, client.routing.pool, client.model
        wait_s = min(self._retries.cold_wait_s, client.life.deadline_s - time.monotonic())
        if wait_s <= 0 or client.vectors is not None or not (fleet.is_cold(pool) or fleet.is_coming(name)):
            return 0.0
        with self.metrics.cold.track_inprogress():
            cold_s = await fleet.wait_while_cold(wait_s, pool)
            return cold_s + await fleet.wait_for_adapter(name, wait_s - cold_s)

    def _claim(self, client: ClientRequest) -> Claim:
        slo = client.tier.slo
        return Claim(
            client.num_requests,
            client.account.priority,
            min(self._preparer.timeout_s(client), self._gate.deadline_s(client.routing)),
            client.account.tenant,
            slo.weight if slo.sheddable else math.inf,
        )

    def check_count(self, num_requests: int) -> None:
        """Raise `InvalidRequest` for more requests of one call than can run at once, before they are made."""
        self._admission.check_count(num_requests)

    @contextmanager
    def _place(self, claim: Claim, caller: Caller) -> Generator[Place, None, None]:
        with caller.admit(claim.num_requests), self._admission.admit(claim) as place:
            yield place

    async def tokenize(self, client: ClientRequest) -> list[Sequence[int]]:
        """Return the tokens of each prompt, as its requests would have them. Raises the caller's `DiptychError`."""
        self._preparer.check(client)
        with self._place(Claim(tenant=client.caller.name), client.caller) as place, self._preparer.hold(client) as held:
            await place.wait()
            return await self._preparer.tokens(client, held)

    async def detokenize(self, ids: Sequence[int], caller: Caller) -> str:
        """Return what tokens say, special ones included. Raises the caller's `DiptychError`."""
        with self._place(Claim(tenant=caller.name), caller) as place:
            await place.wait()
            return await self._preparer.tokenization.text(ids, caller.name)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
        """Yield the output in pieces, the last one with `finish` and `usage`. Close it to abort the request."""
        execution = Execution(Progress(request, self._eos_ids, self._retries, self._dispatcher.rng), self._dispatcher)
        response = response_for(request, OutputText(self._tokenizer_of(request), request.params), self.metrics)
        client = request.client
        is_awaited = client.account.priority > LEAST_PRIORITY
        flight = InFlightRequest(client.tier, client.life.arrival_s, response, execution.compute_s, is_awaited)
        outcome = DISCONNECTED  # what ends without a word of ours was ended by the client
        with self._in_flight.holding(flight):
            try:
                piece, finish = response.on_delta(await execution.next())
                self._gate.learn(request)
                while finish is None:
                    _note(client, piece)
                    if piece.text or piece.token_ids or piece.prompt:
                        yield piece
                    response.handed_over()
                    piece, finish = response.on_delta(await execution.next())
                if response.tool and finish is Finish.STOP:
                    execution.tool_called(response.tool)
                execution.close()  # a stop string has cut it short: no more steps for it
                report = await self._report(execution, request) if request.client.wants_report else None
                predicted = execution.predicted(response.num_cut)
                usage = response.finished(execution.prompt_len, execution.cached_tokens, predicted)
                version = request.client.served_by.weights_version
                end = End(finish, usage, report, response.stop, response.stop_token, version)
                _note(client, piece)
                _note_context(client, execution.prompt_len + response.num_tokens)
                if client.turn is not None:
                    await client.turn.ended(request.prompt.ids)
                execution.trace.end = end
                outcome = OK
                yield piece._replace(end=end)
            except DiptychError as error:
                outcome = outcome_of(error)
                raise
            finally:
                execution.close()
                response.close()
                client.caller.charge_output(response.num_tokens)
                self._note_usage(request, execution, response.num_tokens, outcome)

    def _note_usage(self, request: GenerationRequest, execution: Execution, num_tokens: int, outcome: str) -> None:
        if self._usage is None:
            return
        client, is_first = request.client, request.choice == 0
        if outcome == DISCONNECTED and client.state.is_aborted:
            outcome = ABORTED
        record = UsageRecord(
            self._usage.now_s,
            client.life.request_id,
            client.caller.name,
            client.model or self.names[0],
            outcome,
            execution.used_prompt_len * is_first,
            execution.cached_tokens * is_first,
            num_tokens,
        )
        self._usage.add(record)

    async def vectors(self, client: ClientRequest) -> list[Pooled]:
        """Return a vector of each prompt of a request that wants no text. Raises the caller's `DiptychError`."""
        if self._model.pooling is None and not client.account.priority:
            client = replace(client, account=replace(client.account, priority=IDLE_PRIORITY))
        async with self.admit(client) as requests:
            tasks = [asyncio.create_task(self._vector(request)) for request in requests]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _vector(self, request: GenerationRequest) -> Pooled:
        execution = Execution(Progress(request, frozenset(), self._retries, self._dispatcher.rng), self._dispatcher)
        outcome = DISCONNECTED
        try:
            delta = await execution.next()
            outcome = OK
        except DiptychError as error:
            outcome = outcome_of(error)
            raise
        finally:
            execution.close()
            self._note_usage(request, execution, 0, outcome)
        if not delta.vector:
            raise InternalError("a worker made no vector of the prompt: it is of another version than this router")
        execution.trace.end = End(delta.finish or Finish.STOP, Usage(execution.prompt_len, 0, execution.cached_tokens))
        self._gate.learn(request)
        took_s = time.monotonic() - request.client.life.arrival_s
        self.metrics.finished(request.client.tier, took_s, NO_FURTHER_TOKEN_S, took_s)
        self.metrics.used(execution.prompt_len, execution.cached_tokens, 0)
        return Pooled(np.frombuffer(delta.vector, "<f4"), execution.prompt_len, execution.cached_tokens)

    async def _report(self, execution: Execution, request: GenerationRequest) -> Report | None:
        report = await execution.report(REPORT_WAIT_S)
        request.client.trace.mark("report")
        return report

    def _tokenizer_of(self, request: GenerationRequest) -> TextTokenizer:
        """Return what shows what is to be seen of the output."""
        if request.client.shows_special:
            return self._showing_tokenizer
        return self._parsed_tokenizer if request.prompt.new_parser else self._model.tokenizer


def _note(client: ClientRequest, piece: Piece) -> None:
    """Have a session know what its turn has output."""
    if client.turn is not None:
        client.turn.on_output(piece.token_ids)


def _note_context(client: ClientRequest, num_tokens: int) -> None:
    """Have a session know how much context its request has come to."""
    client.state.context_tokens = max(client.state.context_tokens, num_tokens)


def _name(client: ClientRequest) -> str:
    """Return under which a turn is kept: what its client calls it, or else the request's id."""
    return next(iter(client.rids), client.life.request_id)


def _took(stage: str, histogram: Histogram, begun_s: float, trace: Trace) -> float:
    """Note a stage that is over now; return when that is."""
    now_s = time.monotonic()
    histogram.observe(now_s - begun_s)
    trace.note_stage(stage, begun_s, now_s)
    return now_s
