"""What the HTTP API can do, path by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from diptych.common.drain.draining import DrainAnswer
from diptych.common.health.health import ProbeAnswer
from diptych.common.trust.operator_route import OperatorError
from diptych.router.choose.explain import Explanation
from diptych.router.http.anthropic.errors import AnthropicError
from diptych.router.http.anthropic.messages_layout import Message
from diptych.router.http.anthropic.messages_request import MessagesRequest, PromptFields
from diptych.router.http.exchange.errors import Error
from diptych.router.http.native.generate_layout import Generated
from diptych.router.http.native.generate_request import GenerateRequest
from diptych.router.http.native.token_request import DetokenizeRequest, TokenizeRequest
from diptych.router.http.native.tokens import Text, TokenCount, Tokens
from diptych.router.http.openai.chat_layout import ChatCompletion
from diptych.router.http.openai.chat_request import ChatRequest
from diptych.router.http.openai.completion_layout import Completion
from diptych.router.http.openai.completion_request import CompletionRequest
from diptych.router.http.openai.models import Model, ModelList
from diptych.router.http.openai.responses_layout import Response
from diptych.router.http.openai.responses_request import ResponsesRequest
from diptych.router.http.openapi.document import Operation
from diptych.router.http.operate.about import Readiness, Status, Version, Welcome
from diptych.router.http.operate.admin import WorkerList

Answers = Mapping[int, object]

_WORK: Final = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)  # what can become of a request that costs something
_LOOK: Final = (401, 404)
TEXT: Final = "text/plain"


def _answers(good: object, error: type, statuses: tuple[int, ...]) -> Answers:
    return {200: good, **dict.fromkeys(statuses, error)}


def _path(name: str, words: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "description": words, "schema": {"type": "string"}}


_DRAIN_PARAMETERS: Final = (
    {"name": "instance", "in": "query", "description": "Only this instance", "schema": {"type": "string"}},
    {"name": "deadline_s", "in": "query", "description": "Seconds", "schema": {"type": "number", "minimum": 0}},
)

GENERATION: Final = (
    Operation(
        "post",
        "/v1/chat/completions",
        "OpenAI's chat",
        _answers(ChatCompletion, Error, _WORK),
        ChatRequest,
        streams=True,
    ),
    Operation(
        "post",
        "/v1/completions",
        "OpenAI's completions",
        _answers(Completion, Error, _WORK),
        CompletionRequest,
        streams=True,
    ),
    Operation(
        "post",
        "/v1/responses",
        "OpenAI's responses, stateless",
        _answers(Response, Error, _WORK),
        ResponsesRequest,
        streams=True,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Anthropic's messages",
        _answers(Message, AnthropicError, _WORK),
        MessagesRequest,
        streams=True,
    ),
    Operation(
        "post",
        "/generate",
        "Text or tokens in, text and tokens out",
        _answers(Generated, Error, _WORK),
        GenerateRequest,
        streams=True,
    ),
)

TOKENS: Final = (
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "How long a prompt is",
        _answers(TokenCount, AnthropicError, _WORK),
        PromptFields,
    ),
    Operation("post", "/tokenize", "Text or messages to tokens", _answers(Tokens, Error, _WORK), TokenizeRequest),
    Operation("post", "/detokenize", "Tokens to text", _answers(Text, Error, _WORK), DetokenizeRequest),
)

MODELS: Final = (
    Operation("get", "/v1/models", "What is served", _answers(ModelList, Error, (401,))),
    Operation(
        "get",
        "/v1/models/{model_id}",
        "One of these",
        _answers(Model, Error, _LOOK),
        parameters=(_path("model_id", "Of the model or adapter"),),
    ),
)

OPERATION: Final = (
    Operation("get", "/health", "The process is alive", {200: Status}, scheme=""),
    *(
        Operation("get", f"/health/{name}", summary, {200: ProbeAnswer, 503: ProbeAnswer}, scheme="")
        for name, summary in (
            ("live", "The event loop comes round"),
            ("ready", "A request could be served"),
            ("startup", "It has started"),
        )
    ),
    Operation("get", "/ping", "The process is alive, in SageMaker's words", {200: Status}, scheme=""),
    Operation("get", "/version", "Of this server", {200: Version}, scheme=""),
    Operation("get", "/", "What there is", {200: Welcome}, scheme=""),
    Operation("get", "/ready", "A request could be served", {200: Readiness, 503: Readiness}, scheme=""),
    Operation("get", "/metrics", "With --open-metrics: for Prometheus", {200: TEXT, 404: Error}, scheme=""),
    Operation("get", "/admin/workers", "The workers", _answers(WorkerList, OperatorError, (401,)), scheme="token"),
    Operation(
        "get",
        "/admin/explain/{request_id}",
        "Why a request went where it went",
        _answers(Explanation, OperatorError, _LOOK),
        parameters=(_path("request_id", "As in the header x-request-id"),),
        scheme="token",
    ),
)

DRAIN: Final = tuple(
    Operation(
        method,
        "/admin/drain",
        summary,
        {status: DrainAnswer, **dict.fromkeys((400, 401, 404), OperatorError)},
        parameters=parameters,
        scheme="token",
    )
    for method, status, summary, parameters in (
        ("get", 200, "How far the drain is", ()),
        ("post", 202, "Begin to leave, or leave less time", _DRAIN_PARAMETERS),
    )
)

OPERATIONS: Final = (*GENERATION, *TOKENS, *MODELS, *OPERATION, *DRAIN)
