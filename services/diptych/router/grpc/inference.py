"""The gRPC service for clients. A cancelled call or a passed deadline ends both legs at once."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

import grpc

from diptych.common.errors import DeadlineExceeded, DiptychError, InternalError, InvalidRequest
from diptych.generation.request_groups import Life
from diptych.router.errors import DISCONNECTED, OK, outcome_of
from diptych.router.extents.message_extent import check_chat, check_count, check_generation
from diptych.router.grpc.convert import (
    abort,
    add_vectors,
    chunk_to_wire,
    follow_from_wire,
    pairs_to_score,
    prompt_to_tokenize,
    prompts_to_embed,
    request_from_wire,
    response_to_wire,
    vector_usage_to_wire,
    vectors_from_wire,
    wish_from_wire,
)
from diptych.router.keys.caller import ANYBODY, Caller, Callers
from diptych.router.serve.models import Models
from diptych.router.serve.pipeline import Pipeline
from diptych.router.serve.response import interleave, wholes
from diptych.router.serve.scoring import embed, score
from diptych.router.serve.sessions import close_session, open_session
from diptych.router.tracing.record import NO_TRACE, Attributes, EntryPoint, Trace
from diptych.router.tracing.tracer import Tracer
from diptych.router.values.request import (
    ClientRequest,
    Prompt,
    is_usable,
    new_request_id,
    request_for_tokens,
    routing_of,
)
from diptych.router.values.slo_tiers import wish_in
from diptych.router.values.validation import MAX_TOKENS
from diptych.v1 import inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)

Request = inference_pb2.GenerateRequest
Chunk = inference_pb2.GenerateChunk
Response = inference_pb2.GenerateResponse
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
STATUSES: Final = {OK: "OK", DISCONNECTED: "CANCELLED"}  # of calls that end without an error of ours


def _entry_point(method: str, *, stream: bool) -> EntryPoint:
    name = f"{INFERENCE.full_name}/{method}"
    attributes: Attributes = {"rpc.system.name": "grpc", "rpc.method": name, "gen_ai.request.stream": stream}
    return EntryPoint(name, attributes, "rpc.response.status_code", name)


STREAM: Final = _entry_point("GenerateStream", stream=True)
WHOLE: Final = _entry_point("Generate", stream=False)
EMBED: Final = _entry_point("Embed", stream=False)
SCORE: Final = _entry_point("Score", stream=False)
NOT_FOLLOWED: Final[AbstractContextManager[Trace]] = nullcontext(NO_TRACE)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Implements `diptych.v1.Inference` over the pipelines."""

    def __init__(self, models: Models, callers: Callers | None, tracer: Tracer, *, stall_s: float) -> None:
        self._models = models
        self._callers = callers  # None: everybody
        self._tracer = tracer
        self._stall_s = stall_s  # that a client may take nothing of a stream

    async def GenerateStream(self, request: Request, context: Context) -> None:
        async with self._answering(context, request.request_id, self._follow(context, STREAM)) as trace:
            client = self._request(request, context, trace, stream=True)
            if client.num_made != client.num_choices:
                text = "best_of must equal n in a stream: the best is known when all are complete"
                raise InvalidRequest(text, param="best_of")
            pipeline = self._models.named(client.model)
            async with (
                pipeline.admit(client) as requests,
                aclosing(interleave([pipeline.generate(each) for each in requests])) as batches,
            ):
                async for batch in batches:
                    for index, piece in batch:
                        await self._write(context, chunk_to_wire(index, piece, client))

    async def Generate(self, request: Request, context: Context) -> Response:
        response = Response()
        async with self._answering(context, request.request_id, self._follow(context, WHOLE)) as trace:
            client = self._request(request, context, trace)
            pipeline = self._models.named(client.model)
            async with pipeline.admit(client) as requests:
                outputs = await wholes([pipeline.generate(each) for each in requests])
            response = response_to_wire(outputs, client)
            response.model = client.model or pipeline.model.model_id
        return response

    async def _write(self, context: Context, chunk: Chunk) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(chunk)
        except TimeoutError:
            raise DeadlineExceeded(f"the client took nothing of its stream for {self._stall_s:g} s") from None

    def _request(self, request: Request, context: Context, trace: Trace, *, stream: bool = False) -> ClientRequest:
        caller = self._caller(context)
        check_generation(request)
        request_id = _usable_id(request.request_id)
        trace.note_origin(request_id, caller.name)
        now_s, left_s = time.monotonic(), context.time_remaining()
        asked, metadata = request_from_wire(request, caller), _metadata(context)
        client = replace(
            asked,
            wish=wish_in(metadata).over(asked.wish),
            life=Life(request_id, now_s, math.inf if left_s is None else now_s + left_s),
            stream=stream,
            routing=routing_of(metadata).in_group(request.session_params.id),
            trace=trace,
            follow=follow_from_wire(request),
        )
        trace.note_parsed(stream)
        return client

    def _caller(self, context: Context) -> Caller:
        """Return whose key the call carries. Raises `Unauthenticated`."""
        if self._callers is None:
            return ANYBODY
        return self._callers.identify(_metadata(context).get("authorization"))

    @asynccontextmanager
    async def _answering(
        self, context: Context, request_id: str = "", followed: AbstractContextManager[Trace] = NOT_FOLLOWED
    ) -> AsyncGenerator[Trace, None]:
        """Turn what goes wrong inside into a status, and count the outcome."""
        outcome = DISCONNECTED  # what ends without a word of ours was ended by the client
        failure: DiptychError | None = None
        with followed as trace:
            try:
                yield trace
                outcome = OK
            except DiptychError as error:
                failure = error
            except Exception:
                logger.exception("request %s failed", request_id)
                failure = InternalError("internal error; the router's log has the details")
            finally:
                outcome = outcome_of(failure) if failure else outcome
                self._models.metrics.requests.labels("grpc", outcome).inc()
                trace.note_outcome(outcome, failure.grpc_status if failure else STATUSES[outcome])
        try:
            if failure is not None:
                await abort(context, failure)  # may take until the client reads, or leaves
        finally:
            del failure  # its traceback has this frame: the two would keep each other, and the request

    def _follow(self, context: Context, entry_point: EntryPoint) -> AbstractContextManager[Trace]:
        return self._tracer.follow(entry_point, lambda: _metadata(context)) if self._tracer.is_on else NOT_FOLLOWED

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        response = inference_pb2.TokenizeResponse()
        async with self._answering(context):
            caller = self._caller(context)
            check_chat(request.chat)
            client = request_for_tokens(request.model, prompt_to_tokenize(request), caller)
            pipeline = self._models.named(request.model)
            (token_ids,) = await pipeline.tokenize(client)
            response.context_len = pipeline.context_len
            response.token_ids.extend(token_ids)
        return response

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        response = inference_pb2.DetokenizeResponse()
        async with self._answering(context):
            caller = self._caller(context)
            check_count("token_ids", request.token_ids, MAX_TOKENS)
            response.text = await self._models.named(request.model).detokenize(request.token_ids, caller)
        return response

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> inference_pb2.EmbedResponse:
        response = inference_pb2.EmbedResponse()
        followed = self._follow(context, EMBED)
        async with self._answering(context, request.options.request_id, followed) as trace:
            client = self._for_vectors(request.options, context, trace, prompts_to_embed(request))
            dimensions = request.dimensions if request.HasField("dimensions") else None
            pipeline = self._models.named(client.model)
            pooled = await embed(client, dimensions, pipeline)
            await add_vectors(response, pooled)
            response.usage.CopyFrom(vector_usage_to_wire(pooled))
            response.model = client.model or pipeline.model.model_id
        return response

    async def Score(self, request: inference_pb2.ScoreRequest, context: Context) -> inference_pb2.ScoreResponse:
        response = inference_pb2.ScoreResponse()
        followed = self._follow(context, SCORE)
        async with self._answering(context, request.options.request_id, followed) as trace:
            pairs = pairs_to_score(request)
            new_request = partial(self._for_vectors, request.options, context, trace)
            pipeline = self._models.named(request.options.model)
            found = await score(pairs, request.instruction or None, new_request, pipeline)
            response.scores.extend(found.scores)
            response.usage.CopyFrom(vector_usage_to_wire(found.pooled))
            response.model = request.options.model or pipeline.model.model_id
        return response

    async def OpenSession(
        self, request: inference_pb2.OpenSessionRequest, context: Context
    ) -> inference_pb2.OpenSessionResponse:
        response = inference_pb2.OpenSessionResponse()
        async with self._answering(context):
            caller = self._caller(context)
            response.session_id = await open_session(self._models, caller.name, wish_from_wire(request))
        return response

    async def CloseSession(
        self, request: inference_pb2.CloseSessionRequest, context: Context
    ) -> inference_pb2.CloseSessionResponse:
        response = inference_pb2.CloseSessionResponse()
        async with self._answering(context):
            caller = self._caller(context)
            response.was_open = await close_session(self._models, caller.name, request.session_id)
        return response

    def _for_vectors(
        self,
        options: inference_pb2.VectorOptions,
        context: Context,
        trace: Trace,
        prompts: Sequence[Prompt],
        labels: tuple[int, ...] = (),
    ) -> ClientRequest:
        caller, left_s, now_s = self._caller(context), context.time_remaining(), time.monotonic()
        request_id = _usable_id(options.request_id)
        deadline_s = math.inf if left_s is None else now_s + left_s
        asked, metadata = vectors_from_wire(options, prompts, labels, caller), _metadata(context)
        life = Life(request_id, now_s, deadline_s)
        trace.note_origin(request_id, caller.name)
        trace.note_parsed(is_stream=False)
        return replace(asked, wish=wish_in(metadata), life=life, routing=routing_of(metadata), trace=trace)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        try:
            self._caller(context)
        except DiptychError as error:
            await abort(context, error)
        return inference_pb2.ListModelsResponse(
            models=[each for pipeline in self._models for each in _listed(pipeline)]
        )


def _listed(pipeline: Pipeline) -> list[inference_pb2.Model]:
    names, context_len = pipeline.names, pipeline.context_len
    models = [inference_pb2.Model(id=name, context_len=context_len) for name in names]
    others = [name for name in pipeline.adapters if name not in names]
    adapters = [inference_pb2.Model(id=name, context_len=context_len, parent=names[0]) for name in others]
    return [*models, *adapters]


def _usable_id(given: str) -> str:
    """Return a request's id, a new one where it has none. Raises `InvalidRequest`."""
    request_id = given or new_request_id()
    if not is_usable(request_id):
        text = "request_id must be at most 128 printable ASCII characters without spaces"
        raise InvalidRequest(text, param="request_id")
    return request_id


def _metadata(context: Context) -> dict[str, str]:
    return {key: str(value) for key, value in context.invocation_metadata() or ()}
