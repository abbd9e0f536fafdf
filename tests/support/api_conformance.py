"""Asks every operation of a served OpenAPI document for what it says it takes, and for what it does not.

Requests are drawn by schemathesis from the document. Answers must have a documented status, content type and schema,
none may be a server error, and what the document forbids must be refused.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

ENDLESS: Final = ("/console/api/stream",)
FORMS: Final = ("/v1/files",)  # schemathesis holds its own uploads against the schema of their text
CHECKS: Final = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
_MESSAGES: Final = [{"role": "user", "content": "hi"}]
_SENSIBLE: Final = {"messages": _MESSAGES, "tokens": [1, 2]}  # so that not all requests end at what nobody can guess
_SHORT: Final = {  # outputs and waits, by path
    "/v1/chat/completions": {"max_tokens": 3, "max_completion_tokens": 3},
    "/v1/completions": {"max_tokens": 3},
    "/v1/responses": {"max_output_tokens": 3},
    "/v1/messages": {"max_tokens": 3},
    "/generate": {"sampling_params": {"max_new_tokens": 3}},
    "/open_session": {"wait_s": 0},
}
_ONE_OF_TWO: Final = {"/generate": {"input_ids": [1, 2]}, "/tokenize": {"prompt": "hi"}}  # that a body needs
_RIVALS: Final = (("text", "input_ids"), ("prompt", "messages"))  # of which a body may have one


def operations(url: str) -> Iterator[Any]:
    """Yield each documented operation whose answers end."""
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        document = json.load(answer, object_hook=_without_tuples)
    schema: Any = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    for result in schema.get_all_operations():
        operation = result.ok()
        is_form = operation.path in FORMS and operation.method == "post"
        if operation.path not in ENDLESS and not is_form:
            yield operation


def _without_tuples(schema: Any) -> Any:
    """Schemathesis checks answers against a schema that says `items` for `prefixItems`, which is none."""
    schema.pop("prefixItems", None)
    return schema


def statuses(operation: Any, mode: GenerationMode, num_examples: int, model: str) -> Counter[int]:
    """Send so many requests; return how often each status came. Raises what is wrong with an answer."""
    seen: Counter[int] = Counter()

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = _integers(case.body)
            _make_sensible(case, model, are_all=seen.total() % 2 == 0)
        response = case.call()
        seen[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    ask()
    return seen


def _make_sensible(case: Any, model: str, *, are_all: bool) -> None:
    case.body.update(_SHORT.get(case.operation.path, {}))
    if "model" in case.body:
        case.body["model"] = model
    for one, other in _RIVALS:
        if one in case.body and other in case.body:
            del case.body[one]
    if are_all:
        case.body.update({name: value for name, value in _SENSIBLE.items() if name in case.body})
        if not any(case.body.get(name) is not None for rivals in _RIVALS for name in rivals):
            case.body.update(_ONE_OF_TWO.get(case.operation.path, {}))


def _integers(value: Any) -> Any:
    """3.0 is an integer to a schema, and none to the server: ask for what is behind."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_integers(each) for each in value]
        case dict():
            return {key: _integers(each) for key, each in value.items()}
    return value
