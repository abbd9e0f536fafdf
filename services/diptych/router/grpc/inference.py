"""The gRPC service for clients. A cancelled call or a passed deadline ends both legs at once."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from diptych.common.errors import DiptychError, InternalError, InvalidRequest, Overloaded, Unavailable
from diptych.router.grpc.convert import chunk_to_wire, response_to_wire, wish_from_wire
from diptych.router.interleave import Batch, interleave
from diptych.router.outcome import DISCONNECTED, OK, outcome_of
from diptych.router.pipeline import Pipeline
from diptych.router.prepare import Wish
from diptych.router.request import Piece, whole
from diptych.v1 import inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)

Request = inference_pb2.GenerateRequest
Chunk = inference_pb2.GenerateChunk
Response = inference_pb2.GenerateResponse


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Implements `diptych.v1.Inference` over the pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def GenerateStream(
        self, request: Request, context: grpc.aio.ServicerContext[Request, Chunk]
    ) -> AsyncIterator[Chunk]:
        async with self._answering(request, context):
            wish = _wish(request, context)
            if wish.num_made != wish.num_choices:
                text = "best_of must equal n in a stream: the best is known when all are complete"
                raise InvalidRequest(text, param="best_of")
            async with aclosing(self._pieces(wish)) as batches:
                async for batch in batches:
                    for index, piece in batch:
                        yield chunk_to_wire(index, piece, wish.request_id)

    async def Generate(self, request: Request, context: grpc.aio.ServicerContext[Request, Response]) -> Response:
        response = Response()
        async with self._answering(request, context):
            wish = _wish(request, context)
            pieces: list[list[Piece]] = [[] for _ in range(wish.num_made)]
            async with aclosing(self._pieces(wish)) as batches:
                async for batch in batches:
                    for index, piece in batch:
                        pieces[index].append(piece)
            response = response_to_wire([whole(run) for run in pieces], wish)
            response.model = wish.model or self._pipeline.model.model_id
        return response

    async def _pieces(self, wish: Wish) -> AsyncGenerator[Batch, None]:
        with self._pipeline.admit(wish):
            requests = await self._pipeline.prepare(wish)
            async with aclosing(interleave([self._pipeline.generate(request) for request in requests])) as batches:
                async for batch in batches:
                    yield batch

    @asynccontextmanager
    async def _answering(
        self, request: Request, context: grpc.aio.ServicerContext[Request, Any]
    ) -> AsyncGenerator[None, None]:
        """Turn what goes wrong inside into a status, and count the outcome."""
        outcome = DISCONNECTED  # what ends without a word of ours was ended by the client
        try:
            yield
            outcome = OK
        except DiptychError as error:
            outcome = outcome_of(error)
            await _abort(context, error)
        except Exception:
            logger.exception("request %s failed", request.request_id)
            failure = InternalError("internal error; the router's log has the details")
            outcome = outcome_of(failure)
            await _abort(context, failure)
        finally:
            self._pipeline.metrics.requests.labels("grpc", outcome).inc()

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[inference_pb2.ListModelsRequest, inference_pb2.ListModelsResponse],
    ) -> inference_pb2.ListModelsResponse:
        base, context_len = self._pipeline.model.model_id, self._pipeline.context_len
        adapters = [inference_pb2.Model(id=i, context_len=context_len, parent=base) for i in self._pipeline.adapters]
        return inference_pb2.ListModelsResponse(
            models=[inference_pb2.Model(id=base, context_len=context_len), *adapters]
        )


def _wish(request: Request, context: grpc.aio.ServicerContext[Request, Any]) -> Wish:
    return wish_from_wire(request, request.request_id or secrets.token_hex(12), context.time_remaining())


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: DiptychError) -> None:
    """End the call with the error's status. Raises."""
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded | Unavailable):
        metadata = (("retry-after", str(error.retry_after_s)),)
    await context.abort(grpc.StatusCode[error.grpc_status], str(error), metadata)
