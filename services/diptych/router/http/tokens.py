"""Text to tokens and back over HTTP, as prompts and outputs of this server have them. No worker hears of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from diptych.common.errors import DiptychError
from diptych.router.http.anthropic_errors import anthropic_error_body
from diptych.router.http.ask import Origin, read_fields
from diptych.router.http.body import BodyLimits, read_body
from diptych.router.http.disconnect import until_disconnect
from diptych.router.http.errors import ErrorBody, Json, error_body, error_response
from diptych.router.http.json_response import json_response
from diptych.router.http.key_gate import caller_of
from diptych.router.http.logprobs import text_of
from diptych.router.http.messages_request import PromptFields
from diptych.router.http.request_id import HEADER, request_id_of
from diptych.router.http.token_request import DetokenizeRequest, TokenizeRequest
from diptych.router.outcome import DISCONNECTED, OK, outcome_of
from diptych.router.pipeline import Pipeline
from diptych.router.wish import wish_for_tokens

Work = Callable[[bytes, Origin, Pipeline], Awaitable[Json]]


@dataclass(frozen=True, slots=True)
class TokenApi:
    """Something that can be asked about tokens."""

    path: str
    work: Work
    error_body: ErrorBody = error_body


async def tokenize(body: bytes, origin: Origin, pipeline: Pipeline) -> Json:
    fields = read_fields(TokenizeRequest, body)
    (ids,) = await pipeline.tokenize(wish_for_tokens(fields.model or "", fields.whole_prompt(), origin.caller))
    answer: Json = {"count": len(ids), "max_model_len": pipeline.context_len, "tokens": list(ids)}
    if fields.return_token_strs:
        token_bytes = pipeline.model.tokenizer.token_bytes
        answer["token_strs"] = [text_of(token_id, token_bytes) for token_id in ids]
    return answer


async def detokenize(body: bytes, origin: Origin, pipeline: Pipeline) -> Json:
    fields = read_fields(DetokenizeRequest, body)
    return {"prompt": await pipeline.detokenize(fields.tokens, origin.caller)}


async def count_tokens(body: bytes, origin: Origin, pipeline: Pipeline) -> Json:
    fields = read_fields(PromptFields, body)
    (ids,) = await pipeline.tokenize(wish_for_tokens(fields.model or "", fields.chat(), origin.caller))
    return {"input_tokens": len(ids)}


TOKEN_APIS = (
    TokenApi("/tokenize", tokenize),
    TokenApi("/detokenize", detokenize),
    TokenApi("/v1/messages/count_tokens", count_tokens, anthropic_error_body),
)


def add_tokens(app: FastAPI, pipeline: Pipeline, limits: BodyLimits) -> None:
    """Add the paths to the application."""

    async def answer(api: TokenApi, request: Request) -> Response:
        origin = Origin(request_id_of(request), request.headers, caller_of(request))
        count = pipeline.metrics.requests.labels
        try:
            body = await read_body(request, limits)
            found = await until_disconnect(request.receive, api.work(body, origin, pipeline))
        except DiptychError as error:
            count("tokens", outcome_of(error)).inc()
            return error_response(error, {HEADER: origin.request_id}, api.error_body)
        count("tokens", OK if found else DISCONNECTED).inc()
        return json_response(found, request)

    for api in TOKEN_APIS:
        app.add_route(api.path, partial(answer, api), methods=["POST"])
