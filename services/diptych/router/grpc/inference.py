"""The gRPC service for clients. A cancelled call or a passed deadline ends both legs at once."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from diptych.common.errors import DiptychError, InternalError, Overloaded, Unavailable
from diptych.router.grpc.convert import chunk_to_wire, wish_from_wire
from diptych.router.outcome import DISCONNECTED, OK, outcome_of
from diptych.router.pipeline import Pipeline
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
        async with self._answering(request, context), aclosing(self._chunks(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def Generate(self, request: Request, context: grpc.aio.ServicerContext[Request, Response]) -> Response:
        response = Response(model=self._pipeline.model.model_id)
        texts = []
        async with self._answering(request, context), aclosing(self._chunks(request, context)) as chunks:
            async for chunk in chunks:
                texts.append(chunk.text)
                response.token_ids.extend(chunk.token_ids)
            response.text = "".join(texts)
            response.request_id, response.finish_reason = chunk.request_id, chunk.finish_reason
            response.usage.CopyFrom(chunk.usage)
        return response

    async def _chunks(
        self, request: Request, context: grpc.aio.ServicerContext[Request, Any]
    ) -> AsyncGenerator[Chunk, None]:
        request_id = request.request_id or secrets.token_hex(12)
        wish = wish_from_wire(request, request_id, context.time_remaining())
        with self._pipeline.admit(wish):
            (prepared,) = await self._pipeline.prepare(wish)
            async with aclosing(self._pipeline.generate(prepared)) as pieces:
                async for piece in pieces:
                    yield chunk_to_wire(piece, request_id)

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
        model = inference_pb2.Model(id=self._pipeline.model.model_id, context_len=self._pipeline.context_len)
        return inference_pb2.ListModelsResponse(models=[model])


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: DiptychError) -> None:
    """End the call with the error's status. Raises."""
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded | Unavailable):
        metadata = (("retry-after", str(error.retry_after_s)),)
    await context.abort(grpc.StatusCode[error.grpc_status], str(error), metadata)
