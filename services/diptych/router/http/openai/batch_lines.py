"""Serves lines of batches: as their endpoints serve requests, in the same words, with the lowest priority."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Final

import orjson

from diptych.common.errors import DiptychError, Overloaded, Unavailable
from diptych.router.batches.bench import LineCall
from diptych.router.batches.idle import KEPT
from diptych.router.batches.results import Reply
from diptych.router.errors import OK, AttemptsFailed, ModelNotFound, outcome_of
from diptych.router.extents.json_extent import is_quick
from diptych.router.http.exchange.answers import error_body
from diptych.router.http.exchange.exchange import prompts_of, whole_body
from diptych.router.http.exchange.parse import Origin, Parse, parse_chat, parse_completion, parse_responses, read_fields
from diptych.router.http.vectors.routes import Sender, embeddings
from diptych.router.http.vectors.vector_requests import EmbeddingsRequest
from diptych.router.keys.caller import ANYBODY, Caller, Callers
from diptych.router.serve.models import Models
from diptych.router.serve.pipeline import Pipeline
from diptych.router.tracing.record import NO_TRACE
from diptych.router.values.output import Piece
from diptych.router.values.request import LEAST_PRIORITY, GenerationRequest

API: Final = "batch"  # in metrics
LEARNING_S: Final = 300.0  # after its start, in which a router may not know all workers, and so all names of models
PARSERS: Final[Mapping[str, Parse]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/v1/responses": parse_responses,
}


class LineServer:
    """Serves them by the pipelines that serve everybody."""

    def __init__(self, models: Models, callers: Callers | None) -> None:
        self._models = models
        self._callers = callers
        self._begun_s = time.monotonic()

    async def serve(self, call: LineCall) -> Reply:
        """Return what the endpoint answers. Raises `Overloaded` or `Unavailable`: then it is of use later."""
        try:
            body = await self._answer(call)
            outcome, reply = OK, Reply(200, body)
        except ModelNotFound as error:
            if time.monotonic() - self._begun_s < LEARNING_S:
                raise Unavailable(f"{error}; workers may still be coming") from None
            outcome, reply = _refused(error, call.url)
        except AttemptsFailed as error:  # trying it for ever might kill one worker after another
            outcome, reply = _refused(error, call.url)
        except (Overloaded, Unavailable):
            raise
        except DiptychError as error:
            outcome, reply = _refused(error, call.url)
        self._models.metrics.requests.labels(API, outcome).inc()
        return reply

    async def _answer(self, call: LineCall) -> bytes:
        origin = Origin(call.request_id, {}, self._caller(call.tenant), NO_TRACE, priority=LEAST_PRIORITY)
        if call.url not in PARSERS:
            fields = read_fields(EmbeddingsRequest, call.body)
            return orjson.dumps(await embeddings(fields, Sender(origin, self._models.named(fields.model or ""))))
        offers = self._models.now()
        parse = partial(PARSERS[call.url], call.body, origin, offers.model)
        client, layout = parse() if is_quick(call.body) else await asyncio.to_thread(parse)
        pipeline = offers.named(client.model).pipeline
        async with pipeline.admit(client) as requests:
            layout.prompts = prompts_of(requests, client)
            streams = [_noting(call.slot.answered, pipeline, request) for request in requests]
            return await whole_body(client, layout, streams)

    def _caller(self, tenant: str) -> Caller:
        """Whose allowances it counts against. A key that is gone may come back until the batch expires."""
        if self._callers is None:
            return ANYBODY
        holder = self._callers.holder(tenant)
        if holder is None:
            raise Unavailable(f"there is no key {tenant!r} any more")
        if not holder.keeps(KEPT):
            raise Overloaded(
                f"what is left of the limits of the key {tenant!r} is for requests that somebody waits for"
            )
        return holder


def _refused(error: DiptychError, url: str) -> tuple[str, Reply]:
    return outcome_of(error), Reply(error.http_status, orjson.dumps(error_body(error, url)))


async def _noting(
    on_answered: Callable[[], None], pipeline: Pipeline, request: GenerationRequest
) -> AsyncGenerator[Piece, None]:
    """Yield an output, and say when it begins."""
    async with aclosing(pipeline.generate(request)) as pieces:
        async for piece in pieces:
            on_answered()
            yield piece
