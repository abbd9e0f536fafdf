"""Text to tokens and back over HTTP, as prompts and outputs of this server have them. No worker hears of it.

What the bodies may contain is in vLLM's words.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, NotRequired

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from diptych.common.errors import DiptychError, InvalidRequest
from diptych.router.errors import DISCONNECTED, OK, outcome_of
from diptych.router.http.anthropic.messages_request import PromptFields
from diptych.router.http.exchange.answers import json_response, refusal
from diptych.router.http.exchange.body import BodyReader
from diptych.router.http.exchange.disconnect import until_disconnect
from diptych.router.http.exchange.key_gate import caller_of
from diptych.router.http.exchange.parse import read_fields
from diptych.router.http.fields.logprobs import text_of
from diptych.router.http.fields.request_fields import Token
from diptych.router.http.fields.strict_model import Body
from diptych.router.http.fields.tool_fields import Tools, shown_tools
from diptych.router.http.openai.chat_request import Messages, turns_of
from diptych.router.keys.caller import Caller
from diptych.router.serve.models import Models
from diptych.router.serve.pipeline import Pipeline
from diptych.router.values.request import ChatPrompt, Prompt, TextPrompt, request_for_tokens

Work = Callable[[Any, Caller, Pipeline], Awaitable[Mapping[str, object]]]


class TokenizeRequest(Body):
    """`prompt`, or `messages` to be rendered with the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None  # beside messages
    chat_template_kwargs: dict[str, Any] | None = None  # likewise
    add_special_tokens: bool = True  # of a prompt: as completions do
    return_token_strs: bool = False

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        for index, message in enumerate(self.messages or ()):
            message.check(f"messages[{index}]")

    def whole_prompt(self) -> Prompt:
        if self.prompt is not None:
            return TextPrompt(self.prompt, self.add_special_tokens)
        turns, images = turns_of(self.messages or ())
        tools = shown_tools(self.tools or (), None)
        return ChatPrompt(turns, tools, self.chat_template_kwargs or {}, images=images)


class DetokenizeRequest(Body):
    """Tokens."""

    model: str | None = None
    tokens: list[Token]


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


async def tokenize(fields: TokenizeRequest, caller: Caller, pipeline: Pipeline) -> Tokens:
    (ids,) = await pipeline.tokenize(request_for_tokens(fields.model or "", fields.whole_prompt(), caller))
    answer: Tokens = {"count": len(ids), "max_model_len": pipeline.context_len, "tokens": list(ids)}
    if fields.return_token_strs:
        token_bytes = pipeline.model.tokenizer.token_bytes
        answer["token_strs"] = [text_of(token_id, token_bytes) for token_id in ids]
    return answer


async def detokenize(fields: DetokenizeRequest, caller: Caller, pipeline: Pipeline) -> Text:
    return {"prompt": await pipeline.detokenize(fields.tokens, caller)}


async def count_tokens(fields: PromptFields, caller: Caller, pipeline: Pipeline) -> TokenCount:
    (ids,) = await pipeline.tokenize(request_for_tokens(fields.model or "", fields.chat(), caller))
    return {"input_tokens": len(ids)}


Fields = TokenizeRequest | DetokenizeRequest | PromptFields

TOKEN_APIS: Final[Mapping[str, tuple[type[Fields], Work]]] = {  # by path: the body, and what is made of it
    "/tokenize": (TokenizeRequest, tokenize),
    "/detokenize": (DetokenizeRequest, detokenize),
    "/v1/messages/count_tokens": (PromptFields, count_tokens),
}


def add_tokens(app: FastAPI, models: Models, bodies: BodyReader) -> None:
    """Add the paths to the application."""

    async def answer(body: type[Fields], work: Work, request: Request) -> Response:
        caller, count = caller_of(request), models.metrics.requests.labels
        held = bodies.hold(caller.name)
        try:
            fields = await bodies.read(request, held, partial(read_fields, body))
            found = await until_disconnect(request.receive, work(fields, caller, models.named(fields.model or "")))
        except DiptychError as error:
            count("tokens", outcome_of(error)).inc()
            return refusal(error, request)
        finally:
            held.release()
        count("tokens", OK if found else DISCONNECTED).inc()
        return json_response(found, request)

    for path, (body, work) in TOKEN_APIS.items():
        app.add_route(path, partial(answer, body, work), methods=["POST"])
