"""The OpenAPI document of the HTTP API, made from the models that requests are read with and the types of answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

Json = dict[str, Any]

EVENT: Final[Json] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
REFERENCE: Final = "#/components/schemas/{model}"
_REASONS: Final[Mapping[int, str]] = {
    200: "As asked for",
    202: "Begun",
    400: "The request is wrong: the message says what to change",
    401: "No key, or one that is not known",
    403: "The key is not for this",
    404: "There is no such thing",
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
    answers: Mapping[int, object]  # by status: JSON of this type, or, as a text, this content type
    body: type | None = None
    streams: bool = False  # server-sent events, if the body asks for them
    parameters: Sequence[Json] = ()
    scheme: str = "key"  # of `SCHEMES`; empty: open to everybody


SCHEMES: Final[Json] = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key, where keys are configured"},
    "token": {"type": "http", "scheme": "bearer", "description": "The platform's token, for operators"},
}


def document(operations: Iterable[Operation]) -> Json:
    """Return the document as JSON values."""
    operations = tuple(operations)
    references, schemas = _schemas(operations)
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Diptych", "version": version("diptych"), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": SCHEMES},
    }


References = Mapping[tuple[Any, JsonSchemaMode], Json]  # by type and mode


def _schemas(operations: Sequence[Operation]) -> tuple[References, Json]:
    wanted: dict[tuple[Any, JsonSchemaMode], None] = {}  # a set that keeps its order
    for operation in operations:
        if operation.body is not None:
            wanted[operation.body, "validation"] = None
        types = [answer for answer in operation.answers.values() if not isinstance(answer, str)]
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
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described


def _answer(operation: Operation, status: int, references: References) -> Json:
    answer = operation.answers[status]
    if isinstance(answer, str):
        content: Json = {answer: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": references[answer, "serialization"]}}
    if operation.streams and status == 200:
        content["text/event-stream"] = {"schema": EVENT}
    return {"description": _REASONS[status], "content": content}
