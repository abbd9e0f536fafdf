"""The OpenAPI document of the HTTP API: what it can do, path by path.

It is made from the models that requests are read with and the types of answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, get_args

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from diptych.common.draining import DrainAnswer
from diptych.common.health.health import ProbeAnswer
from diptych.common.trust.operator_route import OperatorError
from diptych.common.version import own_version
from diptych.router.choose.explain import Explanation
from diptych.router.console.calls.request_rows import MAX_ROWS
from diptych.router.console.state import (
    CacheCounts,
    CacheState,
    ChartCounts,
    Charts,
    FleetState,
    RequestList,
    RequestPhase,
    RequestStory,
    Steps,
)
from diptych.router.http.anthropic.messages_layout import Message
from diptych.router.http.anthropic.messages_request import MessagesRequest, PromptFields
from diptych.router.http.console.act_routes import (
    SIGN_IN,
    AdapterChanged,
    CodeBody,
    DrainBegun,
    DrainBody,
    LoadAdapterBody,
    LogLevelBody,
    LogLevelChanged,
    RoleBody,
    RoleChanged,
    SignedIn,
    UnloadAdapterBody,
)
from diptych.router.http.console.documents_routes import API, Me
from diptych.router.http.console.stream import TOPICS
from diptych.router.http.exchange.answers import AnthropicError, Error
from diptych.router.http.native.generate_layout import Generated
from diptych.router.http.native.generate_request import GenerateRequest
from diptych.router.http.native.tokens import DetokenizeRequest, Text, TokenCount, TokenizeRequest, Tokens
from diptych.router.http.openai.batches import Batch, BatchList, BatchRequest
from diptych.router.http.openai.chat_layout import ChatCompletion
from diptych.router.http.openai.chat_request import ChatRequest
from diptych.router.http.openai.completion_layout import Completion
from diptych.router.http.openai.completion_request import CompletionRequest
from diptych.router.http.openai.files import MAX_BATCHES_LISTED, Deleted, File, FileList, UploadBody
from diptych.router.http.openai.models import Model, ModelList
from diptych.router.http.openai.responses_layout import Response
from diptych.router.http.openai.responses_request import ResponsesRequest
from diptych.router.http.operate.about import Readiness, Status, Version, Welcome
from diptych.router.http.operate.admin import WorkerList
from diptych.router.http.operate.server_tools import (
    AbortBody,
    Aborted,
    Begun,
    Closed,
    CloseSessionBody,
    Flushed,
    ModelInfo,
    OpenSessionBody,
    ServerInfo,
    StartProfileBody,
    StopProfileBody,
    Traced,
    WorkerLoadOf,
)
from diptych.router.http.vectors.vector_answers import ClassifiedList, EmbeddingList, PooledList, RankedList, ScoreList
from diptych.router.http.vectors.vector_requests import (
    ClassifyRequest,
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)

Json = dict[str, Any]

EVENT: Final[Json] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
REFERENCE: Final = "#/components/schemas/{model}"
SCHEMES: Final[Json] = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key, where keys are configured"},
    "token": {"type": "http", "scheme": "bearer", "description": "The platform's token, for operators"},
}
_REASONS: Final[Mapping[int, str]] = {
    200: "As asked for",
    202: "Begun",
    303: "A browser is led to the console",
    400: "The request is wrong: the message says what to change",
    401: "No key, or one that is not known",
    403: "The key is not for this",
    404: "There is no such thing",
    409: "It is not in the state for this",
    408: "The body did not come, or too slowly",
    413: "The body is too long",
    415: "The body is compressed",
    429: "Too much at once: try again after `Retry-After` seconds",
    500: "A bug of the server",
    503: "Nobody can serve this now: try again after `Retry-After` seconds",
    504: "It took too long",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """What can be done at a path."""

    method: str  # in small letters
    path: str
    summary: str
    answers: Mapping[int, object]  # by status: JSON of this type, a text: this content type, None: nothing
    body: type | None = None
    streams: bool = False  # server-sent events, if the body asks for them
    body_type: str = "application/json"
    parameters: Sequence[Json] = ()
    scheme: str = "key"  # of `SCHEMES`; empty: open to everybody


_WORK: Final = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)  # what can become of a request that costs something
_LOOK: Final = (401, 404)
_PROBE: Final = {200: ProbeAnswer, 503: ProbeAnswer}


def _answers(good: object, error: type, statuses: tuple[int, ...]) -> Mapping[int, object]:
    return {200: good, **dict.fromkeys(statuses, error)}


def _path(name: str, words: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "description": words, "schema": {"type": "string"}}


def _query(name: str, words: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "description": words, "schema": schema}


_FROM_0: Final[Json] = {"type": "number", "minimum": 0}
_DRAIN_PARAMETERS: Final = (
    _query("instance", "Only this instance", {"type": "string"}),
    _query("deadline_s", "Seconds", _FROM_0),
)

_READ: Final = (401, 403, 429)
_BODY: Final = (400, 401, 403, 408, 413, 415, 429, 503)  # what can become of a short body
_ACT: Final = (404, 409, 500, 504)  # and of what a worker is asked for
_SCOPE: Final = _query("scope", "Of all routers, or of the process that answers alone", {"enum": ["all", "here"]})
_SINCE: Final = _query("since_ms", "That began then or later, in milliseconds since 1970", _FROM_0)
_TOPICS: Final = _query(
    "topics", f"Of {', '.join(TOPICS)}, with commas between; by itself the fleet", {"type": "string"}
)
_WHICH_MODEL: Final = _query("model", "Which one, where several are served", {"type": "string"})
_REQUEST_ID: Final = _path("request_id", "As in the header x-request-id")
_ROWS: Final = (
    _query("phase", "How far the call is", {"enum": list(get_args(RequestPhase))}),
    *(_query(name, "Of the call", {"type": "string"}) for name in ("tenant", "model", "adapter", "outcome")),
    _query("slow_s", "Seconds that it took, or has taken, at least", _FROM_0),
    _query("limit", "Rows at most", {"type": "integer", "minimum": 1, "maximum": MAX_ROWS}),
)

_PAGE: Final = (
    _query("limit", "How many", {"type": "integer", "minimum": 1, "maximum": MAX_BATCHES_LISTED}),
    _query("after", "The id of the last one of the page before", {"type": "string"}),
)
_ORDER: Final = _query("order", "By time", {"enum": ["asc", "desc"]})
_PURPOSE: Final = _query("purpose", "Only those", {"type": "string"})

OPERATIONS: Final = (
    *(
        Operation("post", path, summary, _answers(answer, error, _WORK), body, streams=True)
        for path, summary, answer, error, body in (
            ("/v1/chat/completions", "OpenAI's chat", ChatCompletion, Error, ChatRequest),
            ("/v1/completions", "OpenAI's completions", Completion, Error, CompletionRequest),
            ("/v1/responses", "OpenAI's responses, stateless", Response, Error, ResponsesRequest),
            ("/v1/messages", "Anthropic's messages", Message, AnthropicError, MessagesRequest),
            ("/generate", "Text or tokens in, text and tokens out", Generated, Error, GenerateRequest),
        )
    ),
    *(
        Operation("post", path, summary, _answers(answer, error, _WORK), body)
        for path, summary, answer, error, body in (
            ("/v1/messages/count_tokens", "How long a prompt is", TokenCount, AnthropicError, PromptFields),
            ("/tokenize", "Text or messages to tokens", Tokens, Error, TokenizeRequest),
            ("/detokenize", "Tokens to text", Text, Error, DetokenizeRequest),
            ("/v1/embeddings", "OpenAI's embeddings", EmbeddingList, Error, EmbeddingsRequest),
            ("/pooling", "Vectors as the model made them", PooledList, Error, PoolingRequest),
            ("/classify", "The probabilities of a classifier's labels", ClassifiedList, Error, ClassifyRequest),
            ("/v1/score", "How well two texts fit", ScoreList, Error, ScoreRequest),
            ("/score", "The same", ScoreList, Error, ScoreRequest),
            ("/v1/rerank", "Documents in the order in which they fit a query", RankedList, Error, RerankRequest),
            ("/v2/rerank", "The same", RankedList, Error, RerankRequest),
            ("/rerank", "The same", RankedList, Error, RerankRequest),
        )
    ),
    Operation(
        "post",
        "/v1/files",
        "Upload the input of a batch",
        _answers(File, Error, (400, 401, 404, 408, 413, 503)),
        UploadBody,
        body_type="multipart/form-data",
    ),
    Operation(
        "post",
        "/v1/batches",
        "Have the requests of a file run when there is time",
        _answers(Batch, Error, (400, 401, 404, 408, 413, 415, 429, 503)),
        BatchRequest,
    ),
    *(
        Operation("get", path, summary, _answers(answer, Error, (400, 401, 404, 503)), parameters=(*_PAGE, *others))
        for path, summary, answer, others in (
            ("/v1/files", "Files, the newest first", FileList, (_ORDER, _PURPOSE)),
            ("/v1/batches", "Batches, the newest first", BatchList, (_ORDER,)),
        )
    ),
    *(
        Operation(
            method,
            path,
            summary,
            _answers(answer, Error, (401, 404, *others, 503)),
            parameters=(_path(name, "Its id"),),
        )
        for method, path, summary, answer, others, name in (
            ("get", "/v1/files/{file_id}", "What is known of a file", File, (), "file_id"),
            ("get", "/v1/files/{file_id}/content", "What it says", "application/octet-stream", (), "file_id"),
            ("delete", "/v1/files/{file_id}", "Delete it", Deleted, (409,), "file_id"),
            ("get", "/v1/batches/{batch_id}", "How far a batch is", Batch, (), "batch_id"),
            ("post", "/v1/batches/{batch_id}/cancel", "Run no more of it", Batch, (409,), "batch_id"),
        )
    ),
    Operation("get", "/v1/models", "What is served", _answers(ModelList, Error, (401,))),
    Operation(
        "get",
        "/v1/models/{model_id}",
        "One of these",
        _answers(Model, Error, _LOOK),
        parameters=(_path("model_id", "Of the model or adapter"),),
    ),
    *(
        Operation("get", path, summary, answers, scheme="")
        for path, summary, answers in (
            ("/health", "The process is alive", {200: Status}),
            ("/health/live", "The event loop comes round", _PROBE),
            ("/health/ready", "A request could be served", _PROBE),
            ("/health/startup", "It has started", _PROBE),
            ("/ping", "The process is alive, in SageMaker's words", {200: Status}),
            ("/version", "Of this server", {200: Version}),
            ("/", "What there is; browsers are led to the console", {200: Welcome, 303: None}),
            ("/ready", "A request could be served", {200: Readiness, 503: Readiness}),
            ("/metrics", "With --open-metrics: for Prometheus", {200: "text/plain", 404: Error}),
        )
    ),
    *(
        Operation(
            "get",
            f"{API}/{path}",
            summary,
            _answers(answer, OperatorError, statuses),
            parameters=parameters,
            scheme="token",
        )
        for path, summary, answer, statuses, parameters in (
            ("me", "Who asks", Me, _READ, ()),
            ("fleet", "Workers, links, routers and pools", FleetState, _READ, ()),
            ("requests", "Calls that run, and the last that ended", RequestList, (400, *_READ), (*_ROWS, _SCOPE)),
            (
                "requests/{request_id}",
                "All that is known of a call",
                RequestStory,
                (400, 404, *_READ),
                (_REQUEST_ID, _SCOPE),
            ),
            ("cache", "What prefix caches are worth", CacheState | CacheCounts, (400, *_READ), (_SCOPE,)),
            ("charts", "The last hour", Charts | ChartCounts, (400, *_READ), (_SCOPE,)),
            ("steps", "Steps of workers, the newest of too many", Steps, (400, *_READ), (_SINCE,)),
        )
    ),
    Operation(
        "get",
        f"{API}/stream",
        "Snapshots of topics, then what changes of them",
        {200: "text/event-stream", **dict.fromkeys((400, 503, *_READ), OperatorError)},
        parameters=(_TOPICS,),
        scheme="token",
    ),
    *(
        Operation("post", path, summary, _answers(answer, OperatorError, (*statuses, *_BODY)), body, scheme=scheme)
        for path, summary, answer, statuses, body, scheme in (
            (SIGN_IN, "An operator's token for a code that holds once", SignedIn, (), CodeBody, ""),
            (f"{API}/acts/drain", "Have a worker leave", DrainBegun, _ACT, DrainBody, "token"),
            (f"{API}/acts/role", "Give a worker another role", RoleChanged, _ACT, RoleBody, "token"),
            (
                f"{API}/acts/load-adapter",
                "Load an adapter on all workers",
                AdapterChanged,
                _ACT,
                LoadAdapterBody,
                "token",
            ),
            (f"{API}/acts/unload-adapter", "Unload one everywhere", AdapterChanged, _ACT, UnloadAdapterBody, "token"),
            (f"{API}/acts/log-level", "How much a worker logs", LogLevelChanged, _ACT, LogLevelBody, "token"),
        )
    ),
    *(
        Operation("get", path, summary, {200: "text/html", 404: OperatorError}, scheme="")
        for path, summary in (("/console/", "The console, a page for browsers: with --console on, as all below it"),)
    ),
    *(
        Operation("get", path, summary, _answers(ModelInfo, Error, (400, 401, 404)), parameters=(_WHICH_MODEL,))
        for path, summary in (("/get_model_info", "The model, in SGLang's words"), ("/model_info", "The same"))
    ),
    Operation(
        "post",
        "/abort_request",
        "End a request by its id, in SGLang's words",
        _answers(Aborted, Error, (400, 401, 403, 408, 413, 415, 429)),
        AbortBody,
    ),
    Operation(
        "post",
        "/open_session",
        "Keep the tokens of turns, in SGLang's words",
        _answers(str, Error, (400, 401, 404, 408, 409, 413, 415, 429, 503)),
        OpenSessionBody,
    ),
    Operation(
        "post",
        "/close_session",
        "Forget them",
        _answers(Closed, Error, (400, 401, 408, 413, 415, 429, 503)),
        CloseSessionBody,
    ),
    *(
        Operation("get", path, summary, _answers(answer, OperatorError, (401,)), scheme="token")
        for path, summary, answer in (
            ("/get_server_info", "What the server is, in SGLang's words", ServerInfo),
            ("/server_info", "The same", ServerInfo),
            ("/get_load", "How busy each worker is, in SGLang's words", list[WorkerLoadOf]),
        )
    ),
    *(
        Operation("post", path, summary, _answers(answer, OperatorError, (*_BODY, *_ACT)), body, scheme="token")
        for path, summary, answer, body in (
            ("/flush_cache", "Forget every cached prefix that no request holds", Flushed, None),
            ("/start_profile", "Trace steps of workers by torch's profiler", Begun, StartProfileBody),
            ("/stop_profile", "End the traces, and say where they are", Traced, StopProfileBody),
        )
    ),
    Operation("get", "/admin/workers", "The workers", _answers(WorkerList, OperatorError, (401,)), scheme="token"),
    Operation(
        "get",
        "/admin/explain/{request_id}",
        "Why a request went where it went",
        _answers(Explanation, OperatorError, _LOOK),
        parameters=(_path("request_id", "As in the header x-request-id"),),
        scheme="token",
    ),
    *(
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
    ),
)


@cache
def openapi_json() -> bytes:
    """Made for the first who asks: most routers are never asked. Its limits of numbers are too large for orjson."""
    references, schemas = _schemas(OPERATIONS)
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, references)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Diptych", "version": own_version(), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": SCHEMES},
    }
    return json.dumps(document).encode()


References = Mapping[tuple[Any, JsonSchemaMode], Json]  # by type and mode


def _schemas(operations: Sequence[Operation]) -> tuple[References, Json]:
    wanted: dict[tuple[Any, JsonSchemaMode], None] = {}  # a set that keeps its order
    for operation in operations:
        if operation.body is not None:
            wanted[operation.body, "validation"] = None
        types = [answer for answer in operation.answers.values() if not isinstance(answer, str | None)]
        wanted |= {(answer, "serialization"): None for answer in types}
    inputs = [(type_, mode, TypeAdapter[Any](type_)) for type_, mode in wanted]
    references, definitions = TypeAdapter.json_schemas(inputs, ref_template=REFERENCE)
    return references, definitions["$defs"]


def _operation(operation: Operation, references: References) -> Json:
    described: Json = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {str(status): _answer(operation, status, references) for status in operation.answers},
        "security": [{operation.scheme: []}, {}] if operation.scheme else [],
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        schema = references[operation.body, "validation"]
        described["requestBody"] = {"required": True, "content": {operation.body_type: {"schema": schema}}}
    return described


def _answer(operation: Operation, status: int, references: References) -> Json:
    answer = operation.answers[status]
    if answer is None:
        return {"description": _REASONS[status]}
    if isinstance(answer, str):
        content: Json = {answer: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": references[answer, "serialization"]}}
    if operation.streams and status == 200:
        content["text/event-stream"] = {"schema": EVENT}
    return {"description": _REASONS[status], "content": content}
