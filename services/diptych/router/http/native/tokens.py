"""Text to tokens and back over HTTP, as prompts and outputs of this server have them. No worker hears of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NotRequired

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from diptych.common.errors import DiptychError
from diptych.router.errors import DISCONNECTED, OK, outcome_of
from diptych.router.http.anthropic.errors import anthropic_error_body
from diptych.router.http.anthropic.messages_request import PromptFields
from diptych.router.http.exchange.body import BodyReader
from diptych.router.http.exchange.disconnect import until_disconnect
from diptych.router.http.exchange.errors import ErrorBody, error_body, error_response
from diptych.router.http.exchange.json_response import json_response
from diptych.router.http.exchange.key_gate import caller_of
from diptych.router.http.exchange.parse import Origin, read_fields
from diptych.router.http.exchange.request_id import HEADER, request_id_of
from diptych.router.http.fields.logprobs import text_of
from diptych.router.http.fields.strict_model import Body
from diptych.router.http.native.token_request import DetokenizeRequest, TokenizeRequest
from diptych.router.request import request_for_tokens
from diptych.router.serve.pipeline import Pipeline

Work = Callable[[Any, Origin, Pipeline], Awaitable[Mapping[str, object]]]


class Tokens(TypedDict):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    """The answer of /detokenize."""

    prompt: str


class TokenCount(TypedDict):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


@dataclass(frozen=True, slots=True)
class TokenApi:
    """Something that can be asked about tokens."""

    path: str
    fields: type[Body]
    work: Work  # with those
    error_body: ErrorBody = error_body


async def tokenize(fields: TokenizeRequest, origin: Origin, pipeline: Pipeline) -> Tokens:
    (ids,) = await pipeline.tokenize(request_for_tokens(fields.model or "", fields.whole_prompt(), origin.caller))
    answer: Tokens = {"count": len(ids), "max_model_len": pipeline.context_len, "tokens": list(ids)}
    if fields.return_token_strs:
        token_bytes = pipeline.model.tokenizer.token_bytes
        answer["token_strs"] = [text_of(token_id, token_bytes) for token_id in ids]
    return answer


async def detokenize(fields: DetokenizeRequest, origin: Origin, pipeline: Pipeline) -> Text:
    return {"prompt": await pipeline.detokenize(fields.tokens, origin.caller)}


async def count_tokens(fields: PromptFields, origin: Origin, pipeline: Pipeline) -> TokenCount:
    (ids,) = await pipeline.tokenize(request_for_tokens(fields.model or "", fields.chat(), origin.caller))
    return {"input_tokens": len(ids)}


TOKEN_APIS = (
    TokenApi("/tokenize", TokenizeRequest, tokenize),
    TokenApi("/detokenize", DetokenizeRequest, detokenize),
    TokenApi("/v1/messages/count_tokens", PromptFields, count_tokens, anthropic_error_body),
)


def add_tokens(app: FastAPI, pipeline: Pipeline, bodies: BodyReader) -> None:
    """Add the paths to the application."""

    async def answer(api: TokenApi, request: Request) -> Response:
        origin = Origin(request_id_of(request), request.headers, caller_of(request))
        count = pipeline.metrics.requests.labels
        held = bodies.hold(origin.caller.name)
        try:
            fields = await bodies.read(request, held, partial(read_fields, api.fields))
            found = await until_disconnect(request.receive, api.work(fields, origin, pipeline))
        except DiptychError as error:
            count("tokens", outcome_of(error)).inc()
            return error_response(error, {HEADER: origin.request_id}, api.error_body)
        finally:
            held.release()
        count("tokens", OK if found else DISCONNECTED).inc()
        return json_response(found, request)

    for api in TOKEN_APIS:
        app.add_route(api.path, partial(answer, api), methods=["POST"])
